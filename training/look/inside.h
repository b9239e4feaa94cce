// What a model computes of a text, token by token and layer by layer: what a page about it shows.
#pragma once
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "model/generator.h"

namespace train_gpt {

/// The tokens that a page can show.
constexpr int most_look_tokens = 128;

struct LikelyToken {
    int32_t token = 0;
    float probability = 0;
};

/// A token of the text, and what the model expected in its place from the tokens before it.
struct TokenInside {
    int32_t token = 0;
    /// −log p of the token (nats), and how many tokens were likelier. NaN and −1 for the first one,
    /// before which there is nothing.
    float loss = std::numeric_limits<float>::quiet_NaN();
    int64_t rank = -1;
    std::vector<LikelyToken> expected = {};  // the likeliest tokens; empty for the first one
};

/// A layer, of T tokens. Norms are Euclidean, of a token's vector.
struct LayerInside {
    LayerSpec spec;
    std::vector<float> q, k, sinks;  // as attention_weights() takes them
    /// The residual stream before the layer [T], what attention adds to it, and what the MLP or the
    /// experts add.
    std::vector<float> norm, attention_norm, mlp_norm;
    /// The experts of each token and their weights [T, n_expert_per_token]; empty without experts.
    std::vector<int32_t> experts;
    std::vector<float> expert_weights;
};

struct Inside {
    std::vector<TokenInside> tokens;
    std::vector<LayerInside> layers;
    std::vector<float> norm;  // of the residual stream after the last layer [T]
    /// What the model expects after the last token.
    std::vector<LikelyToken> next;
};

/// Feeds a generator, which forgets what it had, at most context() tokens and at least one.
/// most_expected: how many predictions to keep of each place. Only tokens below `vocab_size` are
/// predicted: a model may have more rows than its tokenizer has tokens; losses and probabilities
/// are of all rows. Throws Error if logits are not finite, since they expect nothing.
Inside look_inside(Stream& stream, Generator& generator, std::span<const int32_t> tokens,
                   int most_expected, int64_t vocab_size);

}  // namespace train_gpt
