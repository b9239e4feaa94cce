// The weights of attention, which its kernels never write down.
#pragma once
#include <span>
#include <vector>

namespace train_gpt {

/// T tokens that follow each other from the beginning of a text. H % H_kv == 0.
struct AttentionWeightsShape {
    int T = 0, H = 0, H_kv = 0, D = 0;
    int window = 0;     // a token sees itself and the window − 1 tokens before; 0: all before
    float softcap = 0;  // c, if not 0: a score s counts as c·tanh(s / c)
};

/// The weights [H, T, T + 1] of q [T, H, D] and k [T, H_kv, D], normalised and rotated as attention
/// takes them (kernels/attention/attention.h). Element (h, t, 1 + s) is softmax(q_t·k_s / √D) of
/// head h, 0 where token t does not see token s; element (h, t, 0) is the share of the sink, 0
/// without sinks. sinks: [H], or empty. A row's elements add up to 1.
std::vector<float> attention_weights(const AttentionWeightsShape& shape, std::span<const float> q,
                                     std::span<const float> k, std::span<const float> sinks);

}  // namespace train_gpt
