#include "training/look/inside.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "device/copy.h"

namespace train_gpt {

namespace {

template <class T>
std::vector<T> copied(Stream& stream, Tensor tensor) {
    std::vector<T> values(static_cast<size_t>(tensor.numel()));
    assert(values.size() * sizeof(T) == tensor.bytes());
    stream.synchronize();
    copy_now(stream.device, values.data(), tensor.data, tensor.bytes());
    return values;
}

/// The elements of a tensor of fp32 or bf16, also of one in a GPU's memory.
std::vector<float> floats_of(Stream& stream, Tensor tensor) {
    if (tensor.dtype == DType::fp32) return copied<float>(stream, tensor);
    const std::vector<bf16> values = copied<bf16>(stream, tensor);
    std::vector<float> floats(values.size());
    std::ranges::transform(values, floats.begin(), [](bf16 value) { return to_float(value); });
    return floats;
}

template <class T>
void append(std::vector<T>& to, const std::vector<T>& more) {
    to.insert(to.end(), more.begin(), more.end());
}

/// The norms of the rows of a − b, or of a.
std::vector<float> row_norms(const std::vector<float>& a, size_t columns,
                             const std::vector<float>* b = nullptr) {
    std::vector<float> norms(a.size() / columns);
    for (size_t row = 0; row < norms.size(); ++row) {
        double squares = 0;
        for (size_t i = row * columns; i < (row + 1) * columns; ++i) {
            const double value = b ? double{a[i]} - (*b)[i] : a[i];
            squares += value * value;
        }
        norms[row] = static_cast<float>(std::sqrt(squares));
    }
    return norms;
}

/// Adds what a block computed of the next tokens.
void add_block(Stream& stream, LayerInside& layer, const Block& block, Tensor out) {
    const BlockActivations& a = block.activations;
    layer.spec = block.layer;
    const std::vector<float> qkv = floats_of(stream, a.qkv);
    const auto width = static_cast<size_t>(block.layer.qkv_width()),
               q = static_cast<size_t>(block.layer.attention_width()),
               k = static_cast<size_t>(block.layer.kv_width());
    for (size_t row = 0; row < qkv.size(); row += width) {
        const auto begin = qkv.begin() + static_cast<std::ptrdiff_t>(row),
                   end_q = begin + static_cast<std::ptrdiff_t>(q);
        layer.q.insert(layer.q.end(), begin, end_q);
        layer.k.insert(layer.k.end(), end_q, end_q + static_cast<std::ptrdiff_t>(k));
    }
    if (const Tensor sinks = block.weight(block.parameters.sinks); sinks && layer.sinks.empty()) {
        layer.sinks = floats_of(stream, sinks);
        layer.sinks.resize(static_cast<size_t>(block.layer.n_head));
    }
    const auto C = static_cast<size_t>(block.layer.n_embd);
    const std::vector<float> x = floats_of(stream, a.x), x_mid = floats_of(stream, a.x_mid),
                             x_out = floats_of(stream, out);
    append(layer.norm, row_norms(x, C));
    append(layer.attention_norm, row_norms(x_mid, C, &x));
    append(layer.mlp_norm, row_norms(x_out, C, &x_mid));
    if (!block.layer.experts) return;
    append(layer.experts, copied<int32_t>(stream, a.experts));
    append(layer.expert_weights, copied<float>(stream, a.expert_weights));
}

/// The likeliest tokens, of equal ones the first.
std::vector<LikelyToken> likeliest(std::span<const float> logits, double log_sum, int most) {
    std::vector<int32_t> ids(logits.size());
    std::iota(ids.begin(), ids.end(), 0);
    const auto kept = std::min<std::ptrdiff_t>(most, std::ssize(ids));
    const auto logit = [&](int32_t id) { return logits[static_cast<size_t>(id)]; };
    std::partial_sort(ids.begin(), ids.begin() + kept, ids.end(), [&](int32_t a, int32_t b) {
        return std::pair(logit(b), a) < std::pair(logit(a), b);
    });
    std::vector<LikelyToken> predictions;
    for (auto id = ids.begin(); id < ids.begin() + kept; ++id)
        predictions.push_back({*id, static_cast<float>(std::exp(logit(*id) - log_sum))});
    return predictions;
}

}  // namespace

Inside look_inside(Stream& stream, Generator& generator, std::span<const int32_t> tokens,
                   int most_expected, int64_t vocab_size) {
    assert(!tokens.empty() && std::ssize(tokens) <= generator.context());
    Inside inside;
    for (const int32_t token : tokens) inside.tokens.push_back({.token = token});
    inside.layers.resize(static_cast<size_t>(generator.spec().n_layer));
    size_t place = 0;  // the token after which logits come next
    const auto take_block = [&](Stream& s, int layer, const Block& block, Tensor out) {
        add_block(s, inside.layers[static_cast<size_t>(layer)], block, out);
        if (layer + 1 == generator.spec().n_layer)
            append(inside.norm,
                   row_norms(floats_of(s, out), static_cast<size_t>(block.layer.n_embd)));
    };
    const auto take_logits = [&](std::span<const float> logits) {
        if (!std::ranges::all_of(logits, [](float logit) { return std::isfinite(logit); }))
            throw Error("the model's logits after token ", place + 1, " of ", inside.tokens.size(),
                        " are not finite, so there is nothing to look at; use a checkpoint of "
                        "before its training diverged");
        const double highest = *std::ranges::max_element(logits);
        double sum = 0;
        for (const float logit : logits) sum += std::exp(logit - highest);
        const double log_sum = highest + std::log(sum);
        const auto named = logits.first(
            std::min(logits.size(), static_cast<size_t>(std::max<int64_t>(vocab_size, 0))));
        std::vector<LikelyToken> expected = likeliest(named, log_sum, most_expected);
        if (++place == inside.tokens.size()) {
            inside.next = std::move(expected);
            return;
        }
        TokenInside& next = inside.tokens[place];
        const float logit = logits[static_cast<size_t>(next.token)];
        next.loss = static_cast<float>(log_sum - logit);
        next.rank = std::ranges::count_if(logits, [&](float other) { return other > logit; });
        next.expected = std::move(expected);
    };
    generator.reset();
    generator.watch(stream, tokens, {.block = take_block, .logits = take_logits});
    return inside;
}

}  // namespace train_gpt
