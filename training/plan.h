// The plan of a run: what it takes before it is started, from the code that allocates.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "device/memory.h"
#include "model/gpt.h"
#include "training/choices.h"
#include "training/config.h"

namespace train_gpt {

/// Vocabulary of a run: model.vocab_size, or where it is 0 that of the tokenizer. Throws Error when neither is given.
int64_t vocab_size_of(const Config& config);

/// What is wanted, or where that is nothing ("auto") the device's own choice: bf16 where it
/// multiplies bf16 natively, else fp32.
DType resolve_dtype(std::optional<DType> wanted, const Device& device);
/// The same from a word of precision.dtype; throws Error for another.
DType resolve_dtype(const std::string& word, const Device& device);

/// Memory of each of `ranks` ranks: Trainer over a counting arena.
Arena plan_memory(const Config& config, const GPTShape& shape, DType dtype, Recompute recompute,
                  const Device& device, int ranks = 1);

/// How a step is cut so that it fits into memory.
struct Fit {
    int micro_batch = 0;  // sequences
    Recompute recompute = Recompute::none;
    uint64_t bytes = 0;  // of each rank
};

/// batch.micro_batch and precision.recompute where they are given; where they are 0 and "auto",
/// chosen among the micro-batches that divide a step, feed all ranks and fit into `available`
/// bytes: those with which the busiest rank is done first, when a micro-batch of n tokens takes the
/// time of n + 64 tokens (on a GPU n + 1,024), and recomputing element-wise results 4 %, blocks 33
/// % longer. None is larger than 4,096 tokens (on a GPU 65,536), beyond which nothing is gained.
/// Where none fits: that of the least memory. Throws Error where a step cannot feed all ranks, with
/// what can.
Fit fit_into(uint64_t available, const Config& config, const GPTShape& shape, DType dtype,
             const Device& device, int ranks = 1);

/// What a run that starts or resumes here decides by memory: as `kept` says where that still
/// divides a step, feeds all ranks and fits, else by fit_into().
Choices choose_by_memory(const Choices& kept, uint64_t available, const Config& config,
                         const GPTShape& shape, DType dtype, const Device& device, int ranks = 1);

/// The smallest change to the configuration with which it fits into `available` bytes on each rank, as a sentence.
std::string change_that_fits(const Config& config, const GPTShape& shape, DType dtype,
                             const Device& device, uint64_t available, int ranks = 1);

/// The memory of a run's plan. Where there is not enough, the Error says what takes how much and what would fit.
Arena allocate(const Arena& plan, const Config& config, const GPTShape& shape, DType dtype,
               int ranks = 1);

/// The memory of a plan. Where there is not enough, the Error says what takes how much.
Arena allocate(const Arena& plan);

/// What `train_gpt plan` prints, and why the run cannot start here; empty where it can.
struct PlanReport {
    std::string text, problem;
};

/// Shape, parameters, FLOPs, batch, and memory by purpose for every recompute level, for `world`
/// ranks. Throws Error where a step cannot feed so many.
PlanReport plan_report(const Config& config, const Device& device, int world);

/// "which purpose takes how much", one line each.
std::string memory_table(const Arena& plan);

}  // namespace train_gpt
