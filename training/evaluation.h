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
#include "model/generator.h"
#include "model/pipeline.h"
#include "parallel/mesh.h"
#include "tokenizer/tokenizer.h"

namespace train_gpt {

struct ValidationResult {
    double nats_per_token = 0;
    double bits_per_byte = 0;  // NaN without a tokenizer, which knows the tokens' bytes
    int64_t tokens = 0;
};

/// Returns whether to give up an evaluation. `done`: the share of the evaluation that is done. Each
/// rank calls it between batches. If it returns true on one rank, all ranks stop.
using StopEvaluation = std::function<bool(double done)>;
class EvaluationStopped : public std::exception {};

/// One batch of evaluation: tokens, targets and, with a mask of documents, doc_start, each [B, T],
/// that the host fills in, and what comes back.
class EvaluationBatch {
  public:
    EvaluationBatch() = default;
    /// Context-parallel ranks each fill in whole sequences, and run the model on their part of the
    /// sequences. `vocabulary`: the size of the logits if likeliest_token() is called.
    EvaluationBatch(Arena& arena, const BatchShape& shape, int64_t vocabulary = 0);

    std::span<int32_t> tokens, targets, doc_start;  // host memory; doc_start empty without a mask

    /// Submits the copy of what the host has filled in, as run() does, and returns where it will
    /// be.
    TokenBatch upload(Stream& stream) const;
    /// Runs the model on what the host has filled in. The losses per token are then in the device's
    /// memory.
    void run(Stream& stream, const Pipeline& model) const;
    /// Waits for the device and returns the sum of this rank's losses. Only for ranks that end the
    /// model.
    double total(Stream& stream, const Pipeline& model) const;
    /// Waits for the device and returns each token's loss, in the host's memory. Includes the
    /// tokens of all context-parallel ranks. Only for ranks that end the model.
    std::span<const float> losses(Stream& stream, const Pipeline& model) const;
    /// Waits for the device and returns the token that the model expects most after a token of the
    /// batch, whose number counts over all sequences. All ranks that share the model call it, and
    /// get the same.
    int32_t likeliest_token(Stream& stream, const Pipeline& model, int64_t token) const;

  private:
    DeviceBatch on_device_;
    double *device_total_ = nullptr, *total_ = nullptr;
    float* losses_ = nullptr;
    // The losses of all context-parallel ranks [ranks, B · T / ranks], on the device and the host
    Tensor part_losses_, part_losses_on_host_;
    Tensor logits_, logits_on_host_;  // [1, padded vocabulary]
};

/// A model, and where it is evaluated.
struct EvaluatedModel {
    Stream& stream;
    const Pipeline& model;
    const EvaluationBatch& batch;
    const Mesh& mesh;
    /// Computes tokens one after another and can score them; null if ranks share the model.
    Generator* generator = nullptr;
};

/// Throws EvaluationStopped on all ranks if `stop` returns true on one of them. All ranks call it.
void stop_together(const Mesh& mesh, const StopEvaluation& stop, double done);

/// Several ranks see the same tokens or sequences; only the first of them counts.
bool counts_tokens(const Mesh& mesh, const Pipeline& model);
bool counts_sequences(const Mesh& mesh, const Pipeline& model);

/// Evaluates a model on all targets of the validation windows. Returns
///
///   nats_per_token   Σ loss / number of targets
///   bits_per_byte    Σ loss / (ln 2 · Σ bytes), over the bytes of the targets' text; the
///                    end-of-text token has no bytes
///
/// Data-parallel ranks take turns with the batches. All of them run the model equally often, since
/// they may need each other's weights. All ranks get the same result. One rank alone would get the
/// same bits; context-parallel ranks add the losses in another order. A batch with a document mask
/// needs a tokenizer, whose end-of-text token separates documents. Throws EvaluationStopped on all
/// ranks if `stop` returns true on one of them.
ValidationResult evaluate(const EvaluatedModel& on, const ValidationWindows& windows,
                          const Tokenizer* tokenizer, const StopEvaluation& stop = {});

struct HellaSwagResult {
    int64_t examples = 0;
    /// The share of examples in which the right ending has the lowest summed loss.
    double accuracy = 0;
    /// The share in which the right ending has the lowest loss per token, as llm.c counts.
    double accuracy_normalised = 0;
};

/// HellaSwag (Zellers et al. 2019, arXiv 1905.07830): four endings for each context, one of which
/// is right.
class HellaSwag {
  public:
    /// Reads the published JSONL, whose lines have "ctx", "endings" (4) and "label". Encodes each
    /// ending e as " " + e after ctx. max_examples = 0: all examples. Throws Error if the input is
    /// invalid; the message names file and line.
    HellaSwag(const std::filesystem::path& jsonl, const Tokenizer& tokenizer, int64_t max_examples);

    int64_t size() const { return std::ssize(examples_); }

    struct EndingLoss {
        double nats = 0;     // summed over the tokens that were scored
        int64_t tokens = 0;  // how many were scored
    };
    /// Returns the losses of endings first … first + count − 1; count is at most the model's B.
    /// Ending e of example i has number 4·i + e. On a rank that does not end the model the losses
    /// are 0.
    std::vector<EndingLoss> score(const EvaluatedModel& on, size_t first, size_t count) const;

    /// Scores every ending as the continuation of its context. If context and ending are longer
    /// than the model's T, the start of the context is left out. An ending longer than T loses its
    /// end. Each data-parallel rank scores its share of the examples, and all ranks get the result.
    /// Throws EvaluationStopped on all ranks if `stop` returns true on one of them.
    HellaSwagResult evaluate(const EvaluatedModel& on, const StopEvaluation& stop = {}) const;

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
