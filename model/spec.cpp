#include "model/spec.h"

#include <algorithm>
#include <cassert>

#include "base/error.h"

namespace train_gpt {

LayerSpec DecoderSpec::layer([[maybe_unused]] int i) const {
    assert(i >= 0 && i < n_layer);
    return {.n_embd = n_embd,
            .n_head = n_head,
            .n_kv_head = n_kv_head,
            .head_size = head_size,
            .is_rotary = is_rotary(),
            .qk_norm = qk_norm,
            .mlp = mlp,
            .n_ff = n_ff,
            .norm_epsilon = norm_epsilon};
}

double DecoderSpec::flops_per_token(int T) const {
    double flops = 6.0 * static_cast<double>(vocab_size) * n_embd;
    for (int i = 0; i < n_layer; ++i) flops += layer(i).flops_per_token(T);
    return flops;
}

namespace {

/// Whether every rank gets equal shares and some of the vocabulary.
bool can_be_shared(const DecoderSpec& spec, int64_t ranks) {
    const int64_t whole = ranks * vocab_multiple,
                  part = (spec.vocab_size + whole - 1) / whole * vocab_multiple;
    for (int i = 0; i < spec.n_layer; ++i) {
        const LayerSpec layer = spec.layer(i);
        if (layer.n_head % ranks != 0 || layer.n_kv_head % ranks != 0 || layer.n_ff % ranks != 0)
            return false;
    }
    return (ranks - 1) * part < spec.vocab_size;
}

}  // namespace

DecoderSpec share_of_spec(const DecoderSpec& spec, int ranks) {
    if (!can_be_shared(spec, ranks)) {
        int64_t distance = 1;
        while (!can_be_shared(spec, std::max<int64_t>(ranks - distance, 1)) &&
               !can_be_shared(spec, ranks + distance))
            ++distance;
        const int64_t lower = std::max<int64_t>(ranks - distance, 1);
        throw Error("parallel.tensor = ", ranks, " ranks cannot share ", spec.n_head, " heads, ",
                    spec.n_kv_head, " key/value heads, n_ff = ", spec.n_ff, " and a vocabulary of ",
                    spec.vocab_size, " evenly; parallel.tensor=",
                    can_be_shared(spec, lower) ? lower : ranks + distance, " can");
    }
    DecoderSpec part = spec;
    part.n_head /= ranks;
    part.n_kv_head /= ranks;
    part.n_ff /= ranks;
    return part;
}

}  // namespace train_gpt
