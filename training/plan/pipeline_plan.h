// What `train_gpt plan` says of a pipeline: its schedule, timed from FLOPs.
#pragma once
#include <string>

#include "device/device.h"
#include "model/recompute.h"
#include "model/spec.h"
#include "parallel/pipeline/pipeline_simulation.h"
#include "training/config/config.h"

namespace train_gpt {

/// FLOPs that each stage computes for a micro-batch, where 1 is the forward pass of a layer. A
/// product costs as much in the forward pass as in each half of the backward pass. The first half
/// also has attention, at twice its forward pass; the head's weight gradient; and the forward passes
/// of recomputed blocks. Sends take no time. The embedding and element-wise work are not counted.
PipelineTimes stage_flops(const Config& config, const DecoderSpec& spec, Recompute recompute);

/// The bubble of a step with the most micro-batches, and of each pipeline rank: layers and
/// micro-batches in flight by stage, idle share, and memory; empty without a pipeline.
/// config.batch.micro_batch must be given.
std::string pipeline_table(const Config& config, const DecoderSpec& spec, DType dtype,
                           Recompute recompute, const Device& device, int world);

/// The picture of the schedule (training/report/pipeline_picture.h) with the micro-batch and recomputation
/// that plan_report() chooses. Throws Error if there is no pipeline.
std::string planned_picture(const Config& config, const Device& device, int world);

}  // namespace train_gpt
