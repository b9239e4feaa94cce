#include "model/spec.h"

#include <algorithm>
#include <cassert>

#include "parallel/axes/tensor.h"

namespace train_gpt {

LayerSpec DecoderSpec::layer([[maybe_unused]] int i) const {
    assert(i >= 0 && i < n_layer);
    return {.n_embd = n_embd,
            .n_head = n_head,
            .n_kv_head = n_kv_head,
            .head_size = head_size,
            .is_rotary = is_rotary(),
            .qk_norm = qk_norm,
            .attention_softcap = attention_softcap,
            .mlp = mlp,
            .n_ff = n_ff,
            .norm_epsilon = norm_epsilon};
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
        add({"model.n_ff", layer.n_ff});
    }
    add({"model.vocab_size", spec.vocab_size, vocab_multiple});
    return sizes;
}

DecoderSpec share_of_spec(const DecoderSpec& spec, int ranks) {
    require_shared(shared_sizes(spec), ranks);
    DecoderSpec part = spec;
    part.n_head /= ranks;
    part.n_kv_head /= ranks;
    part.n_ff /= ranks;
    return part;
}

}  // namespace train_gpt
