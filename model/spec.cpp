#include "model/spec.h"

#include <algorithm>
#include <cassert>
#include <cmath>

#include "parallel/axes/tensor.h"

namespace train_gpt {

double LayerSpec::matrix_parameters() const {
    const double C = n_embd, attention = C * qkv_width() + attention_width() * C;
    if (!experts) return attention + C * up_width() + C * n_ff;
    const double hidden =
        double{1} * experts.n_expert_per_token * experts.n_ff + experts.n_ff_shared;
    return attention + C * experts.n_expert + 3 * C * hidden + (experts.shared_gate ? C : 0);
}

int64_t LayerSpec::idle_parameters() const {
    if (!experts) return 0;
    const int64_t F = experts.n_ff, C = n_embd,
                  of_expert = 3 * C * F + (experts.biases ? 2 * F + C : 0);
    return (experts.n_expert - experts.n_expert_per_token) * of_expert;
}

int64_t ExpertSpec::most_routes(int64_t T) const {
    if (capacity == 0) return 0;
    // A product that is whole, such as 1.1 · 10, stays what it is.
    constexpr double rounding = 1e-12;
    const double share =
        capacity * static_cast<double>(T * n_expert_per_token) / static_cast<double>(n_expert);
    const double most = std::ceil(share * (1 - rounding));
    // Each token goes to an expert once at most.
    return most >= static_cast<double>(T) ? 0 : static_cast<int64_t>(most);
}

double LayerSpec::seen_keys(int T) const {
    // All but the first queries see `window` keys.
    if (window > 0 && window < T) return window - double{1} * window * window / (2.0 * T);
    return T / 2.0;
}

double LayerSpec::flops_per_token(int T) const {
    return 6 * matrix_parameters() + 12.0 * attention_width() * seen_keys(T);
}

LayerSpec DecoderSpec::layer(int i) const {
    assert(i >= 0 && i < n_layer);
    return {.n_embd = n_embd,
            .n_head = n_head,
            .n_kv_head = n_kv_head,
            .head_size = head_size,
            .is_rotary = is_rotary(),
            .qk_norm = qk_norm,
            .whole_n_head = whole_n_head ? whole_n_head : n_head,
            .whole_n_kv_head = whole_n_kv_head ? whole_n_kv_head : n_kv_head,
            .attention_softcap = attention_softcap,
            .window = has_window(i) ? window : 0,
            .sinks = sinks,
            .mlp = mlp,
            .clamped = clamped,
            .n_ff = n_ff,
            .experts = has_experts(i) ? experts : ExpertSpec{},
            .norm_epsilon = norm_epsilon};
}

int64_t DecoderSpec::idle_parameters() const {
    int64_t n = 0;
    for (int i = 0; i < n_layer; ++i) n += layer(i).idle_parameters();
    return n;
}

bool DecoderSpec::has_experts(int i) const {
    return experts && (i + 1) % experts_every == 0 &&
           std::ranges::find(dense_layers, i) == dense_layers.end();
}

double DecoderSpec::flops_per_token(int T) const {
    double flops = 6.0 * static_cast<double>(vocab_size) * n_embd;
    for (int i = 0; i < n_layer; ++i) flops += layer(i).flops_per_token(T);
    return flops;
}

std::vector<SharedSize> shared_sizes(const DecoderSpec& spec) {
    std::vector<SharedSize> sizes;
    const auto add = [&](const SharedSize& size) {
        if (std::ranges::find(sizes, size) == sizes.end()) sizes.push_back(size);
    };
    for (int i = 0; i < spec.n_layer; ++i) {
        const LayerSpec layer = spec.layer(i);
        add({"model.n_head", layer.n_head});
        add({"model.n_kv_head", layer.n_kv_head});
        if (!layer.experts) add({"model.n_ff", layer.n_ff});
        if (layer.experts) add({"model.n_ff_expert", layer.experts.n_ff});
        if (layer.experts.n_ff_shared > 0) add({"model.n_ff_shared", layer.experts.n_ff_shared});
    }
    add({"model.vocab_size", spec.vocab_size, vocab_multiple});
    return sizes;
}

DecoderSpec share_of_spec(const DecoderSpec& spec, int ranks) {
    require_shared(shared_sizes(spec), ranks);
    DecoderSpec part = spec;
    part.whole_n_head = spec.n_head, part.whole_n_kv_head = spec.n_kv_head;
    part.n_head /= ranks;
    part.n_kv_head /= ranks;
    part.n_ff /= ranks;
    part.experts.n_ff /= ranks;
    part.experts.n_ff_shared /= ranks;
    return part;
}

}  // namespace train_gpt
