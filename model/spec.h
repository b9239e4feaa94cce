// What a decoder is made of: the one description from which a model's parameters, activations,
// passes and FLOPs follow. A family (model/families) makes it.
#pragma once
#include <cstdint>
#include <string>

#include "kernels/norm.h"

namespace train_gpt {

struct Family;

/// The extents that a configuration sets.
struct DecoderSize {
    int64_t n_layer = 0, n_head = 0, n_embd = 0, n_ctx = 0, vocab_size = 0;
};

/// Returns the size. Throws Error, whose message begins with `where`, when an extent is impossible.
const DecoderSize& checked(const DecoderSize& size, const std::string& where);

/// A pre-norm decoder with causal attention and an MLP with tanh-GELU. Its query heads share n_kv_head
/// key/value heads in groups of equal size.
struct DecoderSpec {
    const Family* family = nullptr;
    int n_layer = 0, n_head = 0, n_kv_head = 0, head_size = 0, n_embd = 0, n_ff = 0, n_ctx = 0;
    int64_t vocab_size = 0;
    Norm norm = Norm::layer;
    float norm_epsilon = 1e-5f;
    bool biases = true;             // of linear layers and norms
    bool tied_head = true;          // the output head is the token embedding
    bool learned_positions = true;  // added to the token embedding

    /// Widths of attention's output, and of its packed input: q, k and v of a token.
    int attention_width() const { return n_head * head_size; }
    int qkv_width() const { return (n_head + 2 * n_kv_head) * head_size; }
    /// Rows of the embedding in memory: a multiple of 128, for the matrix products. The loss ignores
    /// the padding.
    int64_t padded_vocab() const { return (vocab_size + 127) / 128 * 128; }
    /// Training FLOPs per token: 6·N + 6·L·H·D·T, where N is the number of parameters in matrix
    /// products and causal attention counts half.
    double flops_per_token(int T) const;

    bool operator==(const DecoderSpec&) const = default;
};

}  // namespace train_gpt
