#include "model/stage_traffic.h"

namespace train_gpt {

int tensor_exchanges(const DecoderSpec& spec, Recompute recompute, bool keep_gathered) {
    constexpr int forward = 4, gradients = 4, norms = 2, recomputed = 3, ends = 4;
    const int again = recompute == Recompute::block ? recomputed : keep_gathered ? 0 : norms;
    return spec.n_layer * (forward + gradients + again) + ends;
}

int64_t bytes_sent(const DecoderSpec& spec, const TensorTraffic& t) {
    if (t.ranks == 1) return 0;
    constexpr int64_t statistics = 3 * sizeof(float);  // of a row: softmax_stats()
    const int64_t of_exchange =
        t.rows / t.ranks * (t.ranks - 1) * spec.n_embd * static_cast<int64_t>(size_of(t.dtype));
    return tensor_exchanges(spec, t.recompute, t.keep_gathered) * of_exchange +
           t.rows * statistics * (t.ranks - 1);
}

}  // namespace train_gpt
