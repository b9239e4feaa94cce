// What a decoder is made of: the one description from which a model's parameters, activations,
// passes and FLOPs follow. A family (model/families) makes it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/norm.h"
#include "kernels/rope_table.h"

namespace train_gpt {

struct Family;
struct SharedSize;

/// The MLP of a block: down(gelu(up(x))) with the tanh approximation, down(silu(gate(x)) ⊙ up(x)),
/// or down(max(up(x), 0)²).
enum class Mlp : uint8_t { gelu, swiglu, relu2 };

/// Which linear layers have biases: none; the one that computes q, k and v; or all, and LayerNorms
/// too. Files state this once for a model, so it is the same in all layers.
enum class Biases : uint8_t { none, qkv, all };

/// How tokens know their places: by a learned vector added to the token embedding, or by rotation
/// of queries and keys.
enum class Positions : uint8_t { learned, rope };

/// Rows of vocabularies in memory, on each rank, are a multiple of this.
constexpr int64_t vocab_multiple = 128;

/// What one layer is made of: attention's query heads share n_kv_head key/value heads in groups of
/// equal size; the feed-forward part has n_ff hidden values.
struct LayerSpec {
    int n_embd = 0, n_head = 0, n_kv_head = 0, head_size = 0;
    bool is_rotary = false;
    bool qk_norm = false;  // an RMSNorm of each head of q and k before they are rotated
    double attention_softcap = 0;
    Mlp mlp = Mlp::gelu;
    int n_ff = 0;
    double norm_epsilon = 1e-5;

    /// Widths of attention's output, and of its packed input: q, k and v of a token.
    int attention_width() const { return n_head * head_size; }
    int qkv_width() const { return (n_head + 2 * n_kv_head) * head_size; }
    int kv_width() const { return n_kv_head * head_size; }
    /// Columns of the MLP's first product: gate and up are one.
    int up_width() const { return is_gated() ? 2 * n_ff : n_ff; }
    bool is_gated() const { return mlp == Mlp::swiglu; }
    /// Parameters in matrix products that a token passes through.
    double matrix_parameters() const {
        const double C = n_embd;
        return C * qkv_width() + attention_width() * C + C * up_width() + C * n_ff;
    }
    /// Training FLOPs per token: 6 for each of these parameters, and 6·H·D·T, where causal
    /// attention counts half.
    double flops_per_token(int T) const {
        return 6 * matrix_parameters() + 6.0 * attention_width() * T;
    }
};

/// A pre-norm decoder with causal attention. Its query heads share n_kv_head key/value heads in
/// groups of equal size.
struct DecoderSpec {
    const Family* family = nullptr;
    int n_layer = 0, n_head = 0, n_kv_head = 0, head_size = 0, n_embd = 0, n_ff = 0, n_ctx = 0;
    int64_t vocab_size = 0;
    Norm norm = Norm::layer;
    double norm_epsilon = 1e-5;
    Mlp mlp = Mlp::gelu;
    Biases biases = Biases::all;
    bool qk_norm = false;   // an RMSNorm of each head of q and k before they are rotated
    bool tied_head = true;  // the output head is the token embedding
    // Attention's scores and the head's logits stay between −c and c (kernels/softcap_math.h); 0:
    // they are not capped.
    double attention_softcap = 0, head_softcap = 0;
    Positions positions = Positions::learned;
    RopeFrequencies rope = {};  // D is the head size
    // The standard deviation of initial weights, and whether it is scaled by 1/√(2·n_layer) for the
    // projections into the residual stream. What a trained model computes does not depend on them.
    double init_std = 0.02;
    bool init_residual_scaling = true;
    bool init_zero_projections = false;  // these projections are 0 at first

    /// What layer i is made of. All layers of today's families are alike.
    LayerSpec layer(int i) const;
    bool is_rotary() const { return positions == Positions::rope; }
    /// Rows of the embedding in memory: a multiple of 128, for the matrix products. The loss
    /// ignores the padding. (Tensor-parallel ranks hold equal parts, each such a multiple.)
    int64_t padded_vocab() const {
        return (vocab_size + vocab_multiple - 1) / vocab_multiple * vocab_multiple;
    }
    /// Training FLOPs per token: 6·N + 6·Σ H·D·T over the layers, where N is the number of
    /// parameters in matrix products and causal attention counts half.
    double flops_per_token(int T) const;

    bool operator==(const DecoderSpec&) const = default;
};

/// The sizes of a decoder that tensor-parallel ranks share (parallel/axes/tensor.h): the heads and
/// the hidden values of all layers, without repetitions; the vocabulary comes last.
std::vector<SharedSize> shared_sizes(const DecoderSpec& spec);

/// What each of so many tensor-parallel ranks computes of a decoder: its share of the heads, the
/// key/value heads and n_ff; n_embd, the vocabulary and the context stay whole. Throws Error with
/// the nearest number of ranks that works where these cannot be shared evenly.
DecoderSpec share_of_spec(const DecoderSpec& spec, int ranks);

}  // namespace train_gpt
