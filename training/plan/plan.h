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
#include "training/files/kept_choices.h"

namespace train_gpt {

/// A sentence for a new run whose vocabulary is larger than its tokenizer's; else empty. Silent for
/// a size that is rounded up to a multiple of 64 or 128, and for half a percent of it, which
/// published models have.
std::string note_on_vocabulary(const Config& config, const DecoderSpec& spec,
                               const Tokenizer* tokenizer);

/// Memory of a rank, counted by a Trainer over a counting arena; without `rank`, of the rank whose
/// stage of the pipeline needs the most.
Arena plan_memory(const RunShape& shape, const Device& device, std::optional<int> rank = {});
/// The bytes of a rank of each place on the pipeline axis.
std::vector<uint64_t> memory_of_stages(const RunShape& shape, const Device& device);

/// How a step is divided so that it fits into memory.
struct Fit {
    int micro_batch = 0;  // sequences
    Recompute recompute = Recompute::none;
    uint64_t bytes = 0;  // that each rank takes
};

/// batch.micro_batch and precision.recompute as given. If they are 0 and "auto", they are chosen
/// for speed among the micro-batches that divide a step, feed all ranks and fit into `available`
/// bytes: the busiest rank must finish earliest. The estimate: a micro-batch of n tokens takes the
/// time of n + 64 tokens (n + 1,024 on a GPU), 4 % more when element-wise results are recomputed,
/// 33 % more when blocks are. A chosen micro-batch has at most 4,096 tokens (65,536 on a GPU),
/// beyond which nothing is gained, or one sequence where that is longer. If nothing fits: the
/// choice that needs the least memory. Throws Error where a step cannot feed all ranks; the message
/// says what can.
Fit fit_into(uint64_t available, const RunShape& shape, const Device& device);

/// The choices that depend on memory, and only these, for a run that starts or resumes here: those
/// of `kept` where they still divide a step, feed all ranks and fit, else those of fit_into().
Choices choose_by_memory(const Choices& kept, uint64_t available, const RunShape& shape,
                         const Device& device);

/// The smallest change that makes the configuration fit into `available` bytes on each rank, as a
/// sentence; if none does, the least memory that it would need.
std::string change_that_fits(const RunShape& shape, const Device& device, uint64_t available);

/// Allocates the memory of a run's plan. If there is not enough, the Error says what takes how
/// much and what would fit.
Arena allocate(const Arena& plan, const RunShape& shape);

/// Allocates the memory of a plan. Throws Error if there is not enough memory; the message says
/// what takes how much.
Arena allocate(const Arena& plan);

/// What `train_gpt plan` prints. problem: why the run cannot start here; empty if it can.
struct PlanReport {
    std::string text, problem;
};

/// Shape, parameters, FLOPs, batch, and memory by purpose for every recompute level, for `world`
/// ranks. Throws Error if a step cannot feed so many ranks.
PlanReport plan_report(const Config& config, const Device& device, int world);

/// The picture of a pipeline's schedule with the micro-batch and recomputation that plan_report()
/// chooses. Throws Error if there is no pipeline.
std::string planned_picture(const Config& config, const Device& device, int world);

/// Memory by purpose, one line each, and the total.
std::string memory_table(const Arena& plan);

}  // namespace train_gpt
