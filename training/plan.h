// The plan of a run: what it takes before it is started, from the code that allocates.
#pragma once
#include <cstdint>
#include <string>

#include "kernels/memory.h"
#include "model/gpt.h"
#include "training/config.h"

namespace train_gpt {

/// Vocabulary of a run: model.vocab_size, or where it is 0 that of the tokenizer. Throws Error when neither is given.
int64_t vocab_size_of(const Config& config);

/// "auto" to the device's own choice: bf16 where it multiplies bf16 natively, else fp32.
DType resolve_dtype(const std::string& wanted, const Device& device);

/// Memory of each of `ranks` ranks: Trainer over a counting arena.
Arena plan_memory(const Config& config, const GPTShape& shape, DType dtype, Recompute recompute,
                  const Device& device, int ranks = 1);

/// precision.recompute, and for "auto" the least recomputation whose plan fits into `available` bytes on each rank; the
/// most where none fits.
Recompute resolve_recompute(const Config& config, const GPTShape& shape, DType dtype,
                            const Device& device, uint64_t available, int ranks = 1);

/// The smallest change to the configuration with which it fits into `available` bytes on each rank, as a sentence.
std::string change_that_fits(const Config& config, const GPTShape& shape, DType dtype,
                             const Device& device, uint64_t available, int ranks = 1);

/// The memory of a run's plan. Where there is not enough, the Error says what takes how much and what would fit.
Arena allocate(const Arena& plan, const Config& config, const GPTShape& shape, DType dtype,
               int ranks = 1);

/// The memory of a plan. Where there is not enough, the Error says what takes how much.
Arena allocate(const Arena& plan);

/// The report of `train_gpt plan`: shape, parameters, FLOPs, batch, memory by purpose for every recompute level, for
/// `world` ranks. Pure text.
std::string plan_report(const Config& config, const Device& device, int world);

/// "which purpose takes how much", one line each.
std::string memory_table(const Arena& plan);

}  // namespace train_gpt
