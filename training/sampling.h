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
    double top_p =
        1.0;  // draw from the smallest set of likeliest tokens of this total probability (nucleus)
    uint64_t seed = 1;
    std::vector<int64_t> ends = {};  // tokens that end a text, besides the tokenizer's
    /// Of ranks that sample together: makes each token that was drawn the same on all of them.
    std::function<int32_t(int32_t)> agree = {};
};

/// Draws one token from softmax(logits / temperature), restricted by top_k, then by top_p.
/// `uniform`, in [0, 1), decides which. Equal logits rank by id.
int32_t draw_token(std::span<const float> logits, const SamplingOptions& options, double uniform);

/// Continues `prompt` (empty: the start of a document) until max_tokens or the end of the document,
/// and returns the new text. Philox keyed by (seed, sample, i) decides token i of sample number
/// `sample`. After context() tokens the model continues with the newer half of its context. `emit`
/// receives the text as it is generated, in whole UTF-8 characters. `stop` is called before each
/// token; the text ends when it returns true. Throws Error when the tokenizer gives the prompt an
/// id outside the model's vocabulary.
std::string sample_text(Stream& stream, TokenGenerator& generator, const Tokenizer& tokenizer,
                        const std::string& prompt, const SamplingOptions& options, uint64_t sample,
                        const std::function<void(std::string_view)>& emit = {},
                        const std::function<bool()>& stop = {});

}  // namespace train_gpt
