// Generates text with a model: draws the next token, and streams the text in a loop.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/token_generator.h"
#include "tokenizer/tokenizer.h"

namespace train_gpt {

struct SamplingOptions {
    int max_tokens = 64;
    double temperature = 0.8;  // 0: always the likeliest token
    int top_k = 0;             // draw from the k likeliest; 0: from all
    /// Draw from the smallest set of likeliest tokens with this total probability (nucleus).
    double top_p = 1.0;
    uint64_t seed = 1;
    std::vector<int64_t> ends = {};  // tokens that end a text, besides the tokenizer's
    /// If several ranks sample together: gets the token that this rank has drawn, and returns the
    /// token that all ranks take.
    std::function<int32_t(int32_t)> agree = {};
};

/// Draws one token from softmax(logits / temperature), restricted by top_k, then by top_p.
/// `uniform`, in [0, 1), decides which token. Equal logits are ordered by id.
int32_t draw_token(std::span<const float> logits, const SamplingOptions& options, double uniform);

/// A model that generates text.
struct SampledModel {
    Stream& stream;
    TokenGenerator& generator;
    const Tokenizer& tokenizer;
};

/// Continues `prompt` (empty: the start of a document) until max_tokens or the end of the document.
/// Returns the new text. Philox keyed by (seed, sample, i) decides token i of sample number
/// `sample`. After context() tokens the model continues with the newer half of its context. `emit`
/// receives the text while it is generated, in whole UTF-8 characters. `stop` is called before each
/// token; the text ends if it returns true. Throws Error if the tokenizer encodes the prompt with
/// an id outside of the model's vocabulary.
std::string sample_text(const SampledModel& model, const std::string& prompt,
                        const SamplingOptions& options, uint64_t sample,
                        const std::function<void(std::string_view)>& emit = {},
                        const std::function<bool()>& stop = {});

}  // namespace train_gpt
