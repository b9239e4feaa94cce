// How good a model is: validation loss, and HellaSwag.
#pragma once
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <iterator>
#include <span>
#include <vector>

#include "dataloader/loader.h"
#include "model/pipeline.h"
#include "parallel/mesh.h"
#include "tokenizer/tokenizer.h"

namespace train_gpt {

struct ValidationResult {
    double nats_per_token = 0;
    double bits_per_byte = 0;  // NaN without a tokenizer, which knows their bytes
    int64_t tokens = 0;
};

/// Whether to give up an evaluation. Each rank asks before each of its batches, with the share of
/// the evaluation that is done; all ranks obey.
using StopEvaluation = std::function<bool(double done)>;
class EvaluationStopped : public std::exception {};

/// One batch of evaluation: tokens, targets and, with a mask of documents, doc_start, each [B, T],
/// that the host fills in, and what comes back.
class EvaluationBatch {
  public:
    EvaluationBatch() = default;
    /// Context-parallel ranks each fill in whole sequences, and run the model on their part of them.
    EvaluationBatch(Arena& arena, const BatchShape& shape);

    std::span<int32_t> tokens, targets, doc_start;  // host memory; doc_start empty without a mask

    /// Submits the copy of what the host has filled in, as run() does, and returns where it will be.
    TokenBatch upload(Stream& stream) const;
    /// Runs the model on what the host has filled in. The losses per token are then in the device's
    /// memory.
    void run(Stream& stream, const Pipeline& model) const;
    /// The sum of this rank's losses, where it ends the model; waits for the device.
    double total(Stream& stream, const Pipeline& model) const;
    /// Each token's loss, of all context-parallel ranks, for the host; the same.
    std::span<const float> losses(Stream& stream, const Pipeline& model) const;

  private:
    DeviceBatch on_device_;
    double *device_total_ = nullptr, *total_ = nullptr;
    float* losses_ = nullptr;
    // The losses of all context-parallel ranks [ranks, B · T / ranks], on the device and the host
    Tensor part_losses_, part_losses_on_host_;
};

/// Mean loss over all targets of the validation windows, and the same in bits per byte of their
/// text: Σ loss / (ln 2 · Σ bytes). The end-of-text token has no bytes. Data-parallel ranks take turns
/// with the batches, and all run the model equally often, since they may need each other's weights;
/// all get the result that one rank would get, bit for bit (of context-parallel ranks: but for the
/// order of sums). A batch with a document mask
/// needs a tokenizer, whose end-of-text token separates documents. Throws EvaluationStopped on all
/// ranks if one of them must `stop`.
ValidationResult evaluate(Stream& stream, const Pipeline& model, const ValidationWindows& windows,
                          const Tokenizer* tokenizer, const EvaluationBatch& batch,
                          const Mesh& mesh = {}, const StopEvaluation& stop = {});

struct HellaSwagResult {
    int64_t examples = 0;
    double accuracy = 0;  // the ending with the lowest summed loss is the right one
    double accuracy_normalised =
        0;  // … with the lowest loss per token of the ending, as llm.c counts
};

/// HellaSwag (Zellers et al. 2019, arXiv 1905.07830): four endings for each context, one of them
/// right.
class HellaSwag {
  public:
    /// Reads the published JSONL, lines with "ctx", "endings" (4) and "label", and encodes it: each
    /// ending e as " " + e after ctx. max_examples = 0: all. Throws Error that names file and line
    /// of bad input.
    HellaSwag(const std::filesystem::path& jsonl, const Tokenizer& tokenizer, int64_t max_examples);

    int64_t size() const { return std::ssize(examples_); }

    struct EndingLoss {
        double nats = 0;     // summed over what was scored
        int64_t tokens = 0;  // scored
    };
    /// The losses of endings first … first + count − 1, at most the model's B. Ending e of example
    /// i is number 4·i + e. On a rank that does not end the model they are 0.
    std::vector<EndingLoss> score(Stream& stream, const Pipeline& model,
                                  const EvaluationBatch& batch, size_t first, size_t count) const;

    /// Scores every ending as the continuation of its context. Rows longer than the model's T lose
    /// the start of their context; an ending longer than T loses its end. Each data-parallel
    /// rank scores its share of the examples; all get the result. Throws EvaluationStopped on all ranks if one of
    /// them must `stop`.
    HellaSwagResult evaluate(Stream& stream, const Pipeline& model, const EvaluationBatch& batch,
                             const Mesh& mesh = {}, const StopEvaluation& stop = {}) const;

  private:
    static constexpr int endings_per_example = 4;
    struct Example {
        std::vector<int32_t> context, endings[endings_per_example];
        int label = 0;
    };

    std::filesystem::path path_;
    std::vector<Example> examples_;
};

}  // namespace train_gpt
