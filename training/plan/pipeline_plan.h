// What `train_gpt plan` says about a pipeline: its schedule, with times computed from FLOPs.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/pipeline/pipeline_simulation.h"
#include "training/config/layout.h"
#include "training/plan/memory_plan.h"

namespace train_gpt {

/// FLOPs that each stage computes for a micro-batch, where 1 is the forward pass of a layer. A
/// product costs as much in the forward pass as in each half of the backward pass. The first half
/// also has attention, at twice its forward pass; the head's weight gradient; and the forward
/// passes of recomputed blocks. Sends take no time. The embedding and element-wise work are not
/// counted.
PipelineTimes stage_flops(const RunShape& shape);

/// The bubble of a step with the most micro-batches, and of each pipeline rank: layers and
/// micro-batches in flight by stage, idle share, and device memory of each pipeline rank; empty
/// without a pipeline. config.batch.micro_batch must be given.
std::string pipeline_table(const RunShape& shape, const std::vector<DeviceAndHost>& memory);

/// The picture of that schedule (training/report/pipeline_picture.h).
std::string schedule_picture(const RunShape& shape, const std::vector<DeviceAndHost>& memory);

}  // namespace train_gpt
