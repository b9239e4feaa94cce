// The micro-batches among which a run chooses, and what would feed its ranks where there are none.
#pragma once
#include <vector>

#include "device/device.h"
#include "training/config/config.h"

namespace train_gpt {

/// The micro-batches that divide a step, feed all ranks and are not too large to be worth it on the
/// device, ascending; only the given one, where one is given. Throws Error, which says what can
/// feed the ranks, or what exact sums can add up, where there are none.
std::vector<int> possible_micro_batches(const Config& config, const Device& device, int ranks);

}  // namespace train_gpt
