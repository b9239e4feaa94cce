// Where in a step a gradient that is not finite came from.
#pragma once
#include <cstdint>
#include <string>

#include "dataloader/loader.h"
#include "training/run_start.h"

namespace train_gpt {

/// ", in micro-batch 3 of 8, on rank 1": the first micro-batch, of those of all ranks, whose
/// gradient was not finite in `step` (from 0), after which `steps_ago` others have begun. Empty if
/// sums are not exact. All ranks call it, after all work on the device. `loader`: this rank's.
std::string describe_not_finite(const RunStart& start, const TrainLoader& loader, int64_t step,
                                int64_t steps_ago);

}  // namespace train_gpt
