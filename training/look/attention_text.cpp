#include "training/look/attention_text.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "training/look/attention_weights.h"

namespace train_gpt {

namespace {

using Levels = std::vector<unsigned char>;

/// The levels of each head of a layer.
std::vector<Levels> levels_of(const LayerInside& layer, int T) {
    const LayerSpec& spec = layer.spec;
    const std::vector<float> weights =
        attention_weights({.T = T,
                           .H = spec.n_head,
                           .H_kv = spec.n_kv_head,
                           .D = spec.head_size,
                           .window = spec.window,
                           .softcap = static_cast<float>(spec.attention_softcap)},
                          layer.q, layer.k, layer.sinks);
    std::vector<Levels> heads(static_cast<size_t>(spec.n_head));
    size_t row = 0;
    for (Levels& head : heads)
        for (int t = 0; t < T; ++t, row += static_cast<size_t>(T) + 1)
            for (int i = layer.sinks.empty() ? 1 : 0; i <= t + 1; ++i)
                head.push_back(static_cast<unsigned char>(std::lround(
                    attention_levels * std::sqrt(weights[row + static_cast<size_t>(i)]))));
    return heads;
}

}  // namespace

std::string packed_levels(std::span<const unsigned char> levels, int floor) {
    constexpr std::string_view letters =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    const auto is_zero = [&](size_t i) { return levels[i] == 0 || levels[i] < floor; };
    std::string text;
    for (size_t i = 0, zeros = 0; i < levels.size(); i += std::max<size_t>(zeros, 1)) {
        for (zeros = 0; zeros < letters.size() && i + zeros < levels.size() && is_zero(i + zeros);)
            ++zeros;
        if (zeros > 1)
            text += {'.', letters[zeros - 1]};
        else
            text += letters[zeros == 1 ? 0 : levels[i]];
    }
    return text;
}

AttentionText attention_text(const Inside& inside, size_t most_bytes) {
    constexpr int highest_floor = 16;  // 6 %
    std::vector<std::vector<Levels>> levels;
    size_t heads = 1;
    for (const LayerInside& layer : inside.layers) {
        levels.push_back(levels_of(layer, static_cast<int>(inside.tokens.size())));
        heads = std::max(heads, levels.back().size());
    }
    for (AttentionText text;;) {
        size_t bytes = 0;
        text.layers.clear();
        for (const std::vector<Levels>& layer : levels) {
            std::vector<std::string>& of = text.layers.emplace_back();
            for (size_t h = 0; h < layer.size(); h += static_cast<size_t>(text.every))
                bytes += of.emplace_back(packed_levels(layer[h], text.floor)).size() + 3;  // "",
        }
        if (bytes <= most_bytes ||
            (text.floor == highest_floor && static_cast<size_t>(text.every) >= heads))
            return text;
        if (text.floor < highest_floor)
            text.floor *= 2;
        else
            text.every *= 2;
    }
}

}  // namespace train_gpt
