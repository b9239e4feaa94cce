// The micro-batches that a step can be divided into for so many data-parallel ranks.
#pragma once
#include <vector>

#include "device/device.h"
#include "training/config/config.h"

namespace train_gpt {

/// Whether there are any.
bool can_feed(const Config& config, int data_ranks);

/// The micro-batches that divide a step, feed all ranks and are not too large to be worth it on the
/// device, ascending; only the given one, where one is given. Throws Error, which says what can feed
/// the ranks, where there are none.
std::vector<int> possible_micro_batches(const Config& config, const Device& device, int ranks);

}  // namespace train_gpt
