// Where in a step a gradient that is not finite came from.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "dataloader/loader.h"
#include "training/run_start.h"

namespace train_gpt {

/// "h.3.ln_1.weight, in micro-batch 3 of 8, on rank 1; the router of layer 3 is the first with …":
/// the first tensor whose gradient was not finite in `step` (from 0). If sums are exact, the first
/// of all ranks' micro-batches with such a gradient follows. describe_router_not_finite() ends the
/// text. The step had this outcome, and `steps_ago` others have begun after it. All ranks call it,
/// after all work on the device. `loader`: this rank's.
std::string describe_not_finite(const RunStart& start, const TrainLoader& loader, int64_t step,
                                int64_t steps_ago, const StepOutcome& outcome);

/// "; the router of layer 3 is the first with probabilities that are not finite, in 2 sequences".
/// Empty if there is no such router in the step. layers: the layer of each router.
std::string describe_router_not_finite(const std::vector<int>& layers, const RouterReport& report);

}  // namespace train_gpt
