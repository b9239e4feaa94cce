// The router of a mixture of experts: which experts a token goes to, with which weights, and what
// its auxiliary losses need. Shazeer et al., arXiv 1701.06538; Fedus et al. (Switch), 2101.03961;
// z-loss: Zoph et al. (ST-MoE), 2202.08906; selection bias: DeepSeek-V3, 2412.19437.
#pragma once
#include "base/tensor.h"
#include "device/stream.h"

namespace train_gpt {

constexpr int most_experts = 512, most_experts_per_token = 16;

enum class RouterScore : uint8_t { softmax, sigmoid };

/// A token with logits z gives expert i the score s_i = softmax(z)_i over all experts, or σ(z_i).
/// The weight of a chosen expert is scale·s_i or, if `normalise`, scale·s_i / Σ_chosen s. Its
/// probability for the auxiliary loss is p_i = s_i / Σ_all s.
struct RouterRule {
    RouterScore score = RouterScore::softmax;
    bool normalise = false;
    float scale = 1;

    bool operator==(const RouterRule&) const = default;
};

/// For each of N tokens, the k experts with the largest logits or, with a selection bias, the
/// largest s_i + bias_i. They come in descending order of this value; the lower expert comes first
/// where two are equal. The weights do not contain the bias.
///
/// logits fp32 [N, E], selection_bias fp32 [E], experts int32 [N, k], weights fp32 [N, k];
/// k <= E <= most_experts, k <= most_experts_per_token, 1 <= N.
/// The tokens are S <= 65,535 sequences of N / S. Over the tokens of a sequence, each optional:
///   counts int32 [S, E]         how often an expert was chosen
///   probabilities fp32 [S, E]   Σ p_i
///   squared_lse fp32 [S]        Σ (log Σ_i exp z_i)²
///
/// A logit of −∞ masks an expert: it is chosen only if fewer than k others are left, with weight 0.
/// A token with a NaN among its logits goes to experts 0 … k − 1 with weights NaN. A token's
/// experts and weights have the same bits whichever other tokens there are; sums are taken in an
/// order that depends only on N and S.
struct Route {
    Tensor logits, selection_bias = {};
    RouterRule rule;
    Tensor experts, weights;
    Tensor counts = {}, probabilities = {}, squared_lse = {};
};
void route(Stream& stream, const Route& args);

/// The gradient of the logits. With dweights, the gradient of the weights, it is the gradient of
///   Σ dweights·weights + balance·E·Σ_tokens Σ_i load_i·p_i + z_loss·Σ_tokens (log Σ_i exp z_i)²
/// where experts are constants. dlogits [N, E] in fp32 or bf16; experts int32 [N, k], dweights fp32
/// [N, k]; load fp32 [S, E], a row for each of S sequences, or absent (then so is its term).
struct RouteBackward {
    Tensor dlogits, logits;
    RouterRule rule;
    Tensor experts, dweights;
    Tensor load = {};
    float balance = 0, z_loss = 0;
};
void route_backward(Stream& stream, const RouteBackward& args);

/// load fp32 [S, E]: each expert's share of its row of counts, of which there may be several parts,
/// int32 [P·S, E]: rows s, S + s, 2·S + s … are added up. 1/E where a row has no counts.
void expert_load(Stream& stream, Tensor load, Tensor counts);

/// The scratch memory of route() for N tokens in S sequences.
size_t route_scratch_bytes(int64_t N, int64_t S, int64_t E);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const Route& args);
Cost cost_of(const RouteBackward& args);

/// How route() sums over the tokens: first over slabs of tokens, which do not cross sequences, then
/// over the slabs of a sequence. Its scratch memory holds the slabs' sums.
struct RouteSlabs {
    static constexpr int64_t tokens = 64;
    int64_t sequences, sequence_tokens, per_sequence;

    constexpr RouteSlabs(int64_t N, int64_t S)
        : sequences(S), sequence_tokens(N / S), per_sequence((N / S + tokens - 1) / tokens) {}
    constexpr int64_t count() const { return sequences * per_sequence; }
    /// The tokens [first, last) of a slab.
    constexpr int64_t first(int64_t slab) const {
        return slab / per_sequence * sequence_tokens + slab % per_sequence * tokens;
    }
    constexpr int64_t last(int64_t slab) const {
        const int64_t end = (slab / per_sequence + 1) * sequence_tokens,
                      full = first(slab) + tokens;
        return full < end ? full : end;
    }
};
inline int64_t sequences_of(const Route& args) {
    return args.counts          ? args.counts.rows()
           : args.probabilities ? args.probabilities.rows()
           : args.squared_lse   ? args.squared_lse.numel()
                                : 1;
}
constexpr float load_of(int32_t count, int64_t total, int64_t E) {
    return total == 0 ? 1.0f / static_cast<float>(E)
                      : static_cast<float>(count) / static_cast<float>(total);
}

namespace cuda {  // route.cu
void route(Stream& stream, const Route& args);
void route_backward(Stream& stream, const RouteBackward& args);
void expert_load(Stream& stream, Tensor load, Tensor counts);
}  // namespace cuda

}  // namespace train_gpt
