// What is printed about a spike of the loss or the gradient norm (kernels/spikes.h).
#pragma once
#include <cstdint>
#include <string>

#include "dataloader/loader.h"
#include "training/run_start.h"

namespace train_gpt {

/// The line about a step that is a spike: the tensor whose norm has grown most, and the micro-batch
/// with the largest loss, its samples and where they are from. All ranks call it, after the step
/// and before the next spike but one; the first rank gets the line. `loader`: this rank's.
std::string describe_spike(const RunStart& start, const TrainLoader& loader, int64_t step,
                           const StepOutcome& outcome);

}  // namespace train_gpt
