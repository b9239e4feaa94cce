// How good a model is: validation loss, and HellaSwag.
#pragma once
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "dataloader/loader.h"
#include "model/gpt.h"
#include "tokenizer/tokenizer.h"

namespace train_gpt {

struct ValidationResult {
    double nats_per_token = 0;
    double bits_per_byte = 0;  // NaN where no tokenizer tells how long the tokens are
    int64_t tokens = 0;
};

/// One batch of evaluation: host-visible memory for tokens and targets, each [B, T] of the model.
struct EvaluationBatch {
    int32_t *tokens = nullptr, *targets = nullptr;
};

/// Mean loss over all targets of the validation windows, and the same in bits per byte of the text those targets
/// stand for: Σ loss / (ln 2 · Σ bytes). The end-of-text token stands for no bytes.
ValidationResult evaluate(Stream& stream, GPT& model, const ValidationWindows& windows, const Tokenizer* tokenizer,
                          EvaluationBatch batch);

struct HellaSwagResult {
    int64_t examples = 0;
    double accuracy = 0;             // the ending with the lowest summed loss is the right one
    double accuracy_normalised = 0;  // … with the lowest loss per token of the ending
};

/// HellaSwag (Zellers et al. 2019, arXiv 1905.07830) from its published JSONL: lines with "ctx", "endings" (4) and "label".
/// Each ending is scored behind " " as the continuation of ctx. Examples longer than the model's T lose the start of their
/// context. max_examples = 0: all. Throws Error naming file and line of bad input.
HellaSwagResult evaluate_hellaswag(Stream& stream, GPT& model, const Tokenizer& tokenizer,
                                   const std::filesystem::path& jsonl, int64_t max_examples, EvaluationBatch batch);

}  // namespace train_gpt
