// The plan of a run: what it needs, computed before it starts by the code that later allocates.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "device/memory.h"
#include "model/stage.h"
#include "parallel/axes/traffic.h"
#include "tokenizer/tokenizer.h"
#include "training/config/config.h"
#include "training/files/kept_choices.h"

namespace train_gpt {

/// The configuration's tokenizer. Nothing if it names none, or if the size of the vocabulary is given
/// and the tokenizer is not there yet, or not all of it.
std::optional<Tokenizer> tokenizer_there(const Config& config);

/// Vocabulary size of a run: model.vocab_size, or the tokenizer's where that is 0. Throws Error when
/// neither is given, or the tokenizer has more tokens.
int64_t vocab_size_of(const Config& config);
/// The same with the tokenizer of the configuration, which may be null.
int64_t vocab_size_of(const Config& config, const Tokenizer* tokenizer);

/// A sentence for a new run whose vocabulary is larger than its tokenizer's; else empty. Silent for
/// a size that is rounded up to a multiple of 64 or 128, and for half a percent of it, which
/// published models have.
std::string note_on_vocabulary(const Config& config, const DecoderSpec& spec,
                               const Tokenizer* tokenizer);

/// `wanted`, or where there is none ("auto") the device's own choice: bf16 where the device
/// multiplies bf16 natively, else fp32.
DType resolve_dtype(std::optional<DType> wanted, const Device& device);
/// The same for a value of precision.dtype; throws Error for an unknown one.
DType resolve_dtype(const std::string& word, const Device& device);

/// Memory of one of `ranks` ranks, that of a Trainer over a counting arena; without `rank`, of the one
/// whose stage of the pipeline needs the most.
Arena plan_memory(const Config& config, const DecoderSpec& spec, DType dtype, Recompute recompute,
                  const Device& device, int ranks = 1, std::optional<int> rank = {});

/// What a rank of `ranks` with the most micro-batches sends in a step, by group of ranks;
/// config.batch.micro_batch must be given.
Traffic step_traffic(const Config& config, const DecoderSpec& spec, DType dtype, int ranks,
                     Recompute recompute = Recompute::none, int rank = 0);

/// How a step is divided so that it fits into memory.
struct Fit {
    int micro_batch = 0;  // sequences
    Recompute recompute = Recompute::none;
    uint64_t bytes = 0;  // of each rank
};

/// batch.micro_batch and precision.recompute as given. If they are 0 and "auto", they are chosen
/// for speed among the micro-batches that divide a step, feed all ranks and fit into `available`
/// bytes: the busiest rank must finish earliest. The estimate: a micro-batch of n tokens takes the
/// time of n + 64 tokens (n + 1,024 on a GPU), 4 % more when element-wise results are recomputed,
/// 33 % more when blocks are. A chosen micro-batch has at most 4,096 tokens (65,536 on a GPU),
/// beyond which nothing is gained, or one sequence where that is longer. If nothing fits: the
/// choice that needs the least memory. Throws Error where a step cannot feed all ranks; the message
/// says what can.
Fit fit_into(uint64_t available, const Config& config, const DecoderSpec& spec, DType dtype,
             const Device& device, int ranks = 1);

/// The choices that depend on memory, and only these, for a run that starts or resumes here: those
/// of `kept` where they still divide a step, feed all ranks and fit, else those of fit_into().
Choices choose_by_memory(const Choices& kept, uint64_t available, const Config& config,
                         const DecoderSpec& spec, DType dtype, const Device& device, int ranks = 1);

/// The smallest change that makes the configuration fit into `available` bytes on each rank, as a
/// sentence; if none does, the least memory that it would need.
std::string change_that_fits(const Config& config, const DecoderSpec& spec, DType dtype,
                             const Device& device, uint64_t available, int ranks = 1);

/// Allocates the memory of a run's plan. If there is not enough, the Error says what takes how
/// much and what would fit.
Arena allocate(const Arena& plan, const Config& config, const DecoderSpec& spec, DType dtype,
               int ranks = 1);

/// Allocates the memory of a plan. If there is not enough, the Error says what takes how much.
Arena allocate(const Arena& plan);

/// What `train_gpt plan` prints; problem: why the run cannot start here, empty where it can.
struct PlanReport {
    std::string text, problem;
};

/// Shape, parameters, FLOPs, batch, and memory by purpose for every recompute level, for `world`
/// ranks. Throws Error where a step cannot feed that many.
PlanReport plan_report(const Config& config, const Device& device, int world);

/// Memory by purpose, one line each, and the total.
std::string memory_table(const Arena& plan);

}  // namespace train_gpt
