// What a decoder is made of: the one description from which a model's parameters, activations,
// passes and FLOPs follow. A family (model/families) makes it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/experts/route.h"
#include "kernels/norm.h"
#include "kernels/rope_table.h"
#include "kernels/swiglu.h"

namespace train_gpt {

struct Family;
struct SharedSize;

/// The MLP of a block: down(gelu(up(x))) with the tanh approximation, down(silu(gate(x)) ⊙ up(x)),
/// or down(max(up(x), 0)²).
enum class Mlp : uint8_t { gelu, swiglu, relu2 };

/// Which linear layers have biases. none. qkv: the layer that computes q, k and v. attention: also
/// the layer after attention. all: every linear layer, and LayerNorms. Files state this once for a
/// model, so it is the same in all layers. ExpertSpec::biases says whether experts have biases.
enum class Biases : uint8_t { none, qkv, attention, all };

/// What q and k are normalised over before they are rotated, by an RMSNorm: nothing, each head, or
/// all heads together (OLMo).
enum class QkNormKind : uint8_t { off, head, width };

/// How tokens know their places: by a learned vector added to the token embedding, or by rotation
/// of queries and keys.
enum class Positions : uint8_t { learned, rope };

/// Rows of vocabularies in memory, on each rank, are a multiple of this.
constexpr int64_t vocab_multiple = 128;

/// A mixture of experts in place of an MLP: each token goes to n_expert_per_token of n_expert
/// SwiGLU MLPs, and the layer adds what they give, weighted by the router
/// (kernels/experts/route.h).
struct ExpertSpec {
    int n_expert = 0, n_expert_per_token = 0;  // 0: an MLP
    int n_ff = 0;                              // hidden values of each expert
    /// Hidden values of the shared expert, an MLP that every token passes as well; 0: none.
    /// shared_gate: its output is multiplied by σ(w·x).
    int n_ff_shared = 0;
    bool shared_gate = false;
    RouterRule rule = {};
    bool router_bias = false;     // added to the logits
    bool selection_bias = false;  // added to the scores for the choice alone
    bool biases = false;          // of the experts' linear layers
    /// In training an expert takes at most capacity·T·k/E of the k·T routes of a sequence, rounded
    /// up; 0: all of them. No weight depends on it.
    double capacity = 0;

    /// How many routes an expert takes of a sequence of T tokens in training; 0: all.
    int64_t most_routes(int64_t T) const;

    explicit operator bool() const { return n_expert > 0; }
    bool operator==(const ExpertSpec&) const = default;
};

/// What one layer is made of: attention's query heads share n_kv_head key/value heads in groups of
/// equal size; the feed-forward part has n_ff hidden values, or is a mixture of experts.
struct LayerSpec {
    int n_embd = 0, n_head = 0, n_kv_head = 0, head_size = 0;
    bool is_rotary = false;
    QkNormKind qk_norm = QkNormKind::off;
    int whole_n_head = 0, whole_n_kv_head = 0;  // of all tensor-parallel ranks
    double attention_softcap = 0;
    int window = 0;      // a token sees itself and the window − 1 tokens before; 0: all before
    bool sinks = false;  // each head's softmax has one more term (kernels/attention/attention.h)
    Mlp mlp = Mlp::gelu;
    std::optional<ClampedSwiglu> clamped = {};  // SwiGLU's form in gpt-oss
    int n_ff = 0;
    ExpertSpec experts = {};
    double norm_epsilon = 1e-5;

    /// Widths of attention's output, and of its packed input: q, k and v of a token.
    int attention_width() const { return n_head * head_size; }
    int qkv_width() const { return (n_head + 2 * n_kv_head) * head_size; }
    int kv_width() const { return n_kv_head * head_size; }
    /// Columns of the MLP's first product: gate and up are one.
    int up_width() const { return is_gated() ? 2 * n_ff : n_ff; }
    bool is_gated() const { return mlp == Mlp::swiglu; }
    /// Parameters in matrix products that a token passes through.
    double matrix_parameters() const;
    /// Parameters that a token does not pass through: the parameters of the experts that it does
    /// not go to.
    int64_t idle_parameters() const;
    /// How many of T keys a query sees on average: half of them, or fewer in a window.
    double seen_keys(int T) const;
    /// Training FLOPs per token: 6 for each of matrix_parameters(), and 12·H·D for each key
    /// that a query sees.
    double flops_per_token(int T) const;
};

/// A pre-norm decoder with causal attention.
struct DecoderSpec {
    const Family* family = nullptr;
    int n_layer = 0, n_head = 0, n_kv_head = 0, head_size = 0, n_embd = 0, n_ff = 0, n_ctx = 0;
    int64_t vocab_size = 0;
    Norm norm = Norm::layer;
    double norm_epsilon = 1e-5;
    Mlp mlp = Mlp::gelu;
    Biases biases = Biases::all;
    QkNormKind qk_norm = QkNormKind::off;
    bool tied_head = true;  // the output head is the token embedding
    // Attention's scores and the head's logits stay between −c and c (kernels/softcap_math.h); 0:
    // they are not capped.
    double attention_softcap = 0, head_softcap = 0;
    /// The window of the layers that `window_pattern` calls short: it is repeated over the layers,
    /// one letter a layer, S or L (long: no window). 0: no layer has a window.
    int window = 0;
    std::string window_pattern = "S";
    bool sinks = false;
    std::optional<ClampedSwiglu> clamped = {};  // SwiGLU's form in gpt-oss
    /// Which layers have experts: layers l with (l + 1) % experts_every == 0 that are not among
    /// dense_layers.
    ExpertSpec experts = {};
    int experts_every = 1;
    std::vector<int> dense_layers = {};
    /// n_head and n_kv_head of all tensor-parallel ranks together; 0: n_head, n_kv_head.
    int whole_n_head = 0, whole_n_kv_head = 0;
    Positions positions = Positions::learned;
    RopeFrequencies rope = {};  // D is the head size
    // The standard deviation of initial weights, and whether it is scaled by 1/√(2·n_layer) for the
    // projections into the residual stream. What a trained model computes does not depend on them.
    double init_std = 0.02;
    bool init_residual_scaling = true;
    bool init_zero_projections = false;  // these projections are 0 at first

    /// What layer i is made of.
    LayerSpec layer(int i) const;
    bool has_experts(int i) const;
    int64_t idle_parameters() const;  // LayerSpec::idle_parameters() of all layers
    bool has_window(int i) const {
        return window > 0 && window_pattern[static_cast<size_t>(i) % window_pattern.size()] == 'S';
    }
    bool is_rotary() const { return positions == Positions::rope; }
    /// Rows of the embedding in memory: a multiple of 128, for the matrix products. The loss
    /// ignores the padding. (Tensor-parallel ranks hold equal parts, each such a multiple.)
    int64_t padded_vocab() const {
        return (vocab_size + vocab_multiple - 1) / vocab_multiple * vocab_multiple;
    }
    /// Training FLOPs per token: 6·N + 12·Σ H·D·seen_keys(T) over the layers, where N is the number
    /// of parameters in matrix products that a token passes through.
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
