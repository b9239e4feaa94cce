// The micro-batches that a step can be divided into for so many data-parallel ranks.
#pragma once
#include <cstdint>
#include <vector>

#include "device/device.h"
#include "training/config/config.h"

namespace train_gpt {

/// The most tokens of a micro-batch that is chosen, unless one sequence is longer.
int64_t most_tokens(const Device& device);

/// What a step's number of micro-batches must be a multiple of.
int64_t step_multiple(const Config& config, int data_ranks);

/// The micro-batches that divide a step, feed so many data-parallel ranks and have at most so many
/// tokens, ascending; of a given one, only that.
std::vector<int> feeding_micro_batches(const Config& config, int64_t most_tokens, int ranks);

/// Whether feeding_micro_batches() finds one.
bool can_feed(const Config& config, int data_ranks);

/// Throws Error where tensor-parallel ranks cannot share the rows of a micro-batch of B sequences
/// evenly. `rows` says what they are.
void require_even_rows(const Config& config, int64_t B, const char* rows);

}  // namespace train_gpt
