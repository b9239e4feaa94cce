// How many micro-batches a pipeline's stages hold at the same time, counted in a simulated step.
#pragma once
#include <vector>

#include "parallel/pipeline/pipeline_simulation.h"

namespace train_gpt {

/// The most micro-batches in flight of each stage: forward passes that have begun, less backward
/// passes that have ended.
std::vector<int> peak_slots(const PipelineTimeline& timeline, int stages);

}  // namespace train_gpt
