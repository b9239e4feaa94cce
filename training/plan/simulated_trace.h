// A predicted step as a timeline, in the format of `train --trace`.
#pragma once
#include <filesystem>

#include "training/plan/step_simulation.h"

namespace train_gpt {

/// Writes the spans of all pipeline ranks. The step must have been simulated with its spans.
/// first_ranks: the first rank of the run at each place of the pipeline.
void write_trace(const std::filesystem::path& path, const SimulatedStep& step,
                 const std::vector<int>& first_ranks);

}  // namespace train_gpt
