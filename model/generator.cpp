#include "model/generator.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "device/copy.h"
#include "kernels/embedding.h"
#include "kernels/head_loss.h"
#include "kernels/norm.h"
#include "model/scratch.h"

namespace train_gpt {

namespace {

DecoderSpec with_context(DecoderSpec spec, int context) {
    if (context > 0) spec.n_ctx = std::min(spec.n_ctx, context);
    return spec;
}

}  // namespace

Generator::Generator(const DecoderSpec& spec, const Registry& registry, ParameterStore& parameters,
                     Arena& arena, const Options& options)
    : spec_(with_context(spec, options.context)),
      registry_(registry),
      parameters_(parameters),
      rotary_(spec, spec_.n_ctx, arena, Purpose::kv_cache),
      residual_(alone_, spec.norm, spec.norm_epsilon),
      chunk_(std::min(options.chunk, spec_.n_ctx)) {
    const int64_t C = spec_.n_embd;
    const DType dtype = parameters_.dtype();
    const auto buffer = [&](int64_t rows, int64_t cols, DType type) {
        return arena.tensor(type, {rows, cols}, Purpose::kv_cache);
    };
    // All layers share these, which are as wide as the widest layer needs.
    activations_.x = buffer(chunk_, C, dtype);
    for (const Activation& a : widest_activations(spec_, 0, spec_.n_layer, dtype))
        if (!a.in_training_only) activations_.*a.member = buffer(chunk_, a.width, a.dtype);
    x_next_ = buffer(chunk_, C, dtype);
    const int64_t rows = std::max(1, options.scored_rows);
    final_norm_ = buffer(rows, C, dtype);
    for (int l = 0; l < spec_.n_layer; ++l)
        caches_.push_back(buffer(int64_t{2} * spec_.n_ctx, spec_.layer(l).kv_width(), dtype));
    logits_ = buffer(1, spec_.vocab_size, DType::fp32);
    logits_scratch_ = buffer(rows, spec_.padded_vocab(), dtype);
    tokens_ = buffer(1, chunk_, DType::int32);
    host_tokens_ = arena.tensor(DType::int32, {chunk_}, Purpose::staging);
    host_logits_ = arena.tensor(DType::fp32, {spec_.vocab_size}, Purpose::staging);
    if (options.scored_rows == 0) return;
    targets_ = buffer(1, rows, DType::int32);
    losses_ = buffer(1, rows, DType::fp32);
    host_targets_ = arena.tensor(DType::int32, {rows}, Purpose::staging);
    host_losses_ = arena.tensor(DType::fp32, {rows}, Purpose::staging);
}

size_t Generator::scratch_bytes(const Stream& stream) const {
    const auto attention = [&](const LayerSpec& layer) {
        size_t most = 0;
        for (const int T : {1, 2, 3, chunk_})  // a few queries are split over threads differently
            if (T <= chunk_)
                most = std::max(most,
                                attention_forward_scratch_bytes(stream, attention_shape(layer, T)));
        return most;
    };
    return scratch_bytes_of(stream, {.spec = spec_,
                                     .first = 0,
                                     .last = spec_.n_layer,
                                     .dtype = parameters_.dtype(),
                                     .rows = chunk_,
                                     .attention = attention,
                                     .vocab_rows = spec_.padded_vocab(),
                                     .logits_rows = logits_scratch_.rows()});
}

AttentionShape Generator::attention_shape(const LayerSpec& layer, int T) const {
    return train_gpt::attention_shape(layer, parameters_.dtype(), 1, T, position_ + T);
}

Tensor Generator::cache(int layer, int part) const {
    return caches_[static_cast<size_t>(layer)].row_range(int64_t{part} * spec_.n_ctx, spec_.n_ctx);
}

void Generator::feed(Stream& stream, std::span<const int32_t> tokens) {
    assert(!tokens.empty() && position_ + static_cast<int>(tokens.size()) <= spec_.n_ctx);
    while (!tokens.empty()) {
        const size_t n = std::min(tokens.size(), static_cast<size_t>(chunk_));
        const Tensor x = feed_chunk(stream, tokens.first(n));
        tokens = tokens.subspan(n);
        if (tokens.empty())
            compute_logits(stream, final_norm(stream, x.row_range(x.rows() - 1, 1)));
    }
    stream.synchronize();
}

void Generator::score(Stream& stream, std::span<const int32_t> tokens,
                      std::span<const int32_t> targets, std::span<Score> scores,
                      bool with_likeliest) {
    assert(targets_ && !targets.empty() && targets.size() <= tokens.size());
    assert(scores.size() == targets.size());
    assert(position_ + static_cast<int>(tokens.size()) <= spec_.n_ctx);
    const size_t most_rows = static_cast<size_t>(targets_.numel());
    while (!tokens.empty()) {
        size_t n = std::min(tokens.size(), static_cast<size_t>(chunk_));
        const Tensor x = feed_chunk(stream, tokens.first(n));
        const size_t unscored = tokens.size() - targets.size();
        tokens = tokens.subspan(n);
        for (size_t row = unscored; row < n; row += most_rows) {
            const size_t rows = std::min(most_rows, n - row);
            score_rows(stream, x.row_range(static_cast<int64_t>(row), static_cast<int64_t>(rows)),
                       targets.first(rows), scores.first(rows), with_likeliest);
            targets = targets.subspan(rows);
            scores = scores.subspan(rows);
        }
    }
}

void Generator::score_rows(Stream& stream, Tensor x, std::span<const int32_t> targets,
                           std::span<Score> scores, bool with_likeliest) {
    const Tensor normed = final_norm(stream, x);
    std::copy(targets.begin(), targets.end(), host_targets_.as<int32_t>());
    copy(stream, targets_.data, host_targets_.data, targets.size_bytes());
    {
        const UnitLease weights =
            parameters_.weights.acquire(stream, registry_.unit_of(registry_.head));
        head_loss(stream, {.x = normed,
                           .w = weights.weight(registry_.head),
                           .logits = logits_scratch_,
                           .V = spec_.vocab_size,
                           .targets = targets_.as<int32_t>(),
                           .losses = losses_.as<float>()});
    }
    copy(stream, host_losses_.data, losses_.data, targets.size() * sizeof(float));
    stream.synchronize();
    for (size_t i = 0; i < targets.size(); ++i) scores[i] = {.nats = host_losses_.as<float>()[i]};
    for (size_t i = 0; with_likeliest && i < targets.size(); ++i) {
        compute_logits(stream, normed.row_range(static_cast<int64_t>(i), 1));
        stream.synchronize();
        const std::span<const float> all = logits();
        scores[i].likeliest = std::ranges::max_element(all) - all.begin() == targets[i];
    }
}

/// Appends the keys and values of a block's tokens to the cache of its layer, and attends to all of
/// it.
void Generator::attend(Stream& stream, int layer, const Block& block) {
    const BlockActivations& a = block.activations;
    const int H = block.layer.n_head, H_kv = block.layer.n_kv_head, D = block.layer.head_size,
              T = block.attention.T;
    const size_t element = size_of(a.qkv.dtype),
                 row = static_cast<size_t>(H_kv) * static_cast<size_t>(D) * element;
    for (int part = 0; part < 2; ++part)
        copy_rows(stream, {.to = static_cast<char*>(cache(layer, part).data) +
                                 static_cast<size_t>(position_) * row,
                           .to_stride = row,
                           .from = heads_view(a.qkv, H + part * H_kv, T, D).data,
                           .from_stride = static_cast<size_t>(a.qkv.cols()) * element,
                           .row_bytes = row,
                           .rows = T});
    attention_forward(stream, {.shape = block.attention,
                               .q = heads_view(a.qkv, 0, T, D),
                               .k = heads_view(cache(layer, 0), 0, spec_.n_ctx, D),
                               .v = heads_view(cache(layer, 1), 0, spec_.n_ctx, D),
                               .out = heads_view(a.att, 0, T, D),
                               .lse = nullptr});
}

Tensor Generator::feed_chunk(Stream& stream, std::span<const int32_t> tokens) {
    const int T = static_cast<int>(tokens.size());
    Tensor x = activations_.x.row_range(0, T), out = x_next_.row_range(0, T);

    stream.synchronize();  // the previous chunk has been copied
    std::copy(tokens.begin(), tokens.end(), host_tokens_.as<int32_t>());
    copy(stream, tokens_.data, host_tokens_.data, tokens.size_bytes());
    {
        const UnitLease weights =
            parameters_.weights.acquire(stream, registry_.unit_of(registry_.tokens));
        embedding_forward(stream, {.out = x.reshaped({1, T, spec_.n_embd}),
                                   .tokens = tokens_.as<int32_t>(),
                                   .w = weights.weight(registry_.tokens),
                                   .positions = weights.weight(registry_.positions),
                                   .doc_start = nullptr,
                                   .first_position = position_});
    }
    for (int l = 0; l < spec_.n_layer; ++l) {
        const BlockParameters& p = registry_.blocks[static_cast<size_t>(l)];
        const LayerSpec layer = spec_.layer(l);
        const UnitLease weights = parameters_.weights.acquire(stream, registry_.unit_of(p.norm1_w));
        RopeShape rope = rope_shape(layer, parameters_.dtype(), 1, T);
        if (layer.is_rotary) rope.table = rotary_.get(stream), rope.first_position = position_;
        BlockActivations a;
        a.x = x;
        for (const Activation& of : block_activations(layer, parameters_.dtype()))
            if (!of.in_training_only)
                a.*of.member = Tensor((activations_.*of.member).data, of.dtype, {T, of.width});
        const Block block{.layer = layer,
                          .residual = residual_,
                          .weights = weights,
                          .parameters = p,
                          .activations = a,
                          .rope = rope,
                          .attention = attention_shape(layer, T)};
        block_forward(stream, block, out, [&](Stream& s, const Block& of) { attend(s, l, of); });
        std::swap(x, out);
    }
    position_ += T;
    return x;
}

Tensor Generator::final_norm(Stream& stream, Tensor x) {
    const Tensor out = final_norm_.row_range(0, x.rows());
    const UnitLease weights =
        parameters_.weights.acquire(stream, registry_.unit_of(registry_.final_norm_w));
    norm_forward(stream, {.norm = spec_.norm,
                          .out = out,
                          .stats = {},
                          .x = x,
                          .w = weights.weight(registry_.final_norm_w),
                          .b = weights.weight(registry_.final_norm_b),
                          .epsilon = static_cast<float>(spec_.norm_epsilon)});
    return out;
}

void Generator::compute_logits(Stream& stream, Tensor normed) {
    const UnitLease weights =
        parameters_.weights.acquire(stream, registry_.unit_of(registry_.head));
    head_logits(stream, logits_, normed, weights.weight(registry_.head),
                logits_scratch_.row_range(0, 1));
    copy(stream, host_logits_.data, logits_.data, logits_.bytes());
}

}  // namespace train_gpt
