#include "training/look/attention_weights.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

namespace train_gpt {

namespace {

/// Replaces scores by their softmax.
void softmax(std::span<float> row) {
    const float highest = *std::ranges::max_element(row);
    float sum = 0;
    for (float& value : row) sum += value = std::exp(value - highest);
    for (float& value : row) value /= sum;
}

}  // namespace

std::vector<float> attention_weights(const AttentionWeightsShape& shape, std::span<const float> q,
                                     std::span<const float> k, std::span<const float> sinks) {
    const auto T = static_cast<size_t>(shape.T), H = static_cast<size_t>(shape.H),
               H_kv = static_cast<size_t>(shape.H_kv), D = static_cast<size_t>(shape.D),
               window = shape.window > 0 ? static_cast<size_t>(shape.window) : T;
    assert(q.size() == T * H * D && k.size() == T * H_kv * D &&
           (sinks.empty() || sinks.size() == H));
    const float scale = 1.0f / std::sqrt(static_cast<float>(D)), cap = shape.softcap;
    std::vector<float> weights(H * T * (T + 1));
    for (size_t h = 0; h < H; ++h)
        for (size_t t = 0; t < T; ++t) {
            const std::span row = std::span(weights).subspan((h * T + t) * (T + 1), T + 1);
            const size_t first = t + 1 - std::min(window, t + 1), kv_head = h / (H / H_kv);
            const float* const query = q.data() + (t * H + h) * D;
            // A score before the first key, so that the softmax is over one range: of the sink
            std::vector<float> scores(t - first + 2);
            scores[0] = sinks.empty() ? -std::numeric_limits<float>::infinity() : sinks[h];
            for (size_t s = first; s <= t; ++s) {
                const float* const key = k.data() + (s * H_kv + kv_head) * D;
                float dot = 0;
                for (size_t d = 0; d < D; ++d) dot += query[d] * key[d];
                dot *= scale;
                scores[1 + s - first] = cap == 0 ? dot : cap * std::tanh(dot / cap);
            }
            softmax(scores);
            row[0] = scores[0];
            std::copy(scores.begin() + 1, scores.end(),
                      row.begin() + static_cast<std::ptrdiff_t>(1 + first));
        }
    return weights;
}

}  // namespace train_gpt
