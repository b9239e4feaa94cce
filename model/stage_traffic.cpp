#include "model/stage_traffic.h"

namespace train_gpt {

int exchanges_of_layer(Recompute recompute, bool keep_gathered, bool halves_apart) {
    constexpr int forward = 4, gradients = 4, norms = 2, recomputed = 3, gradients_again = 2;
    const bool block = recompute == Recompute::block;
    const bool keeps_norms = keep_gathered || (block && !halves_apart);
    return forward + gradients + (block ? recomputed : 0) + (keeps_norms ? 0 : norms) +
           (halves_apart ? gradients_again : 0);
}

int64_t bytes_sent(const DecoderSpec& spec, const TensorTraffic& t) {
    if (t.ranks == 1) return 0;
    constexpr int64_t statistics = 3 * sizeof(float);  // of a row: softmax_stats()
    const int64_t of_exchange =
        t.rows / t.ranks * (t.ranks - 1) * spec.n_embd * static_cast<int64_t>(size_of(t.dtype));
    const int exchanges =
        t.layers * exchanges_of_layer(t.recompute, t.keep_gathered, t.halves_apart) +
        (t.has_embedding ? 2 : 0) + (t.has_head ? 2 : 0);
    return exchanges * of_exchange + (t.has_head ? t.rows * statistics * (t.ranks - 1) : 0);
}

}  // namespace train_gpt
