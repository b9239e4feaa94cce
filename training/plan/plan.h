// The plan of a run: what the run needs. The code that later allocates memory computes the plan
// before the run starts.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "device/memory.h"
#include "model/stage.h"
#include "tokenizer/tokenizer.h"
#include "training/config/layout.h"
#include "training/plan/memory_plan.h"
#include "training/plan/plan_target.h"

namespace train_gpt {

/// A sentence for a new run whose vocabulary is larger than its tokenizer's; else empty. Silent for
/// a size that is rounded up to a multiple of 64 or 128, and for half a percent of it, which
/// published models have.
std::string note_on_vocabulary(const Config& config, const DecoderSpec& spec,
                               const Tokenizer* tokenizer);

/// What `train_gpt plan` prints. problem: why the run cannot start here; empty if it can.
struct PlanReport {
    std::string text, problem;
    DeviceAndHost needed, available;  // of each rank
};

/// Shape, parameters, FLOPs, batch, and memory by purpose for every recompute level, for `world`
/// ranks. Throws Error if a step cannot feed so many ranks, or if precision.fp8 asks for what the
/// GPU does not have.
PlanReport plan_report(const Config& config, const PlanTarget& target, int world);

/// The picture of a pipeline's schedule with the micro-batch and recomputation that plan_report()
/// chooses. Throws Error if there is no pipeline.
std::string planned_picture(const Config& config, const PlanTarget& target, int world);

}  // namespace train_gpt
