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
        if (!a.in_training_only)
            activations_.*a.member = buffer(a.rows_with(chunk_, chunk_, 1), a.width, a.dtype);
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
    shifts_ = buffer(1, chunk_, DType::int32);
    host_shifts_ = arena.tensor(DType::int32, {chunk_}, Purpose::staging);
    host_targets_ = arena.tensor(DType::int32, {rows}, Purpose::staging);
    host_losses_ = arena.tensor(DType::fp32, {rows}, Purpose::staging);
}

size_t Generator::scratch_bytes(const Stream& stream) const {
    const auto attention = [&](const LayerSpec& layer) {
        size_t most = 0;
        for (const int T : {1, 2, 3, chunk_})  // a few queries are split over threads differently
            if (T <= chunk_)
                most = std::max(most, attention_forward_scratch_bytes(
                                          stream, attention_shape(layer, T, position_)));
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

AttentionShape Generator::attention_shape(const LayerSpec& layer, int T, int position) const {
    return train_gpt::attention_shape(layer, parameters_.dtype(), 1, T, position + T);
}

Tensor Generator::cache(int layer, int part) const {
    return caches_[static_cast<size_t>(layer)].row_range(int64_t{part} * spec_.n_ctx, spec_.n_ctx);
}

void Generator::feed(Stream& stream, std::span<const int32_t> tokens) {
    const Tensor x = take(stream, tokens), normed = final_norm_.row_range(0, 1);
    final_norm(stream, x.row_range(x.rows() - 1, 1), normed);
    compute_logits(stream, normed);
    stream.synchronize();
}

void Generator::watch(Stream& stream, std::span<const int32_t> tokens, const Watcher& watcher) {
    const Tensor normed = final_norm_.row_range(0, 1);
    while (!tokens.empty()) {
        const size_t n = std::min(tokens.size(), static_cast<size_t>(chunk_));
        const Tensor x = take(stream, tokens.first(n), &watcher);
        for (int64_t row = 0; row < static_cast<int64_t>(n); ++row) {
            final_norm(stream, x.row_range(row, 1), normed);
            compute_logits(stream, normed);
            stream.synchronize();
            watcher.logits(logits());
        }
        tokens = tokens.subspan(n);
    }
}

Tensor Generator::take(Stream& stream, std::span<const int32_t> tokens, const Watcher* watcher) {
    assert(!tokens.empty() && position_ + static_cast<int>(tokens.size()) <= spec_.n_ctx);
    Tensor x;
    while (!tokens.empty()) {
        const size_t n = std::min(tokens.size(), static_cast<size_t>(chunk_));
        const Segment segment{.rows = static_cast<int>(n), .position = position_};
        x = compute(stream, tokens.first(n), {&segment, 1}, watcher);
        position_ += segment.rows;
        tokens = tokens.subspan(n);
    }
    return x;
}

void Generator::score(Stream& stream, std::span<const Continuation> continuations,
                      bool with_likeliest) {
    assert(targets_);
    std::vector<int32_t> tokens;
    std::vector<Segment> segments;
    std::vector<ScoredRow> scored;
    const auto finish_chunk = [&] {
        if (tokens.empty()) return;
        score_rows(stream, compute(stream, tokens, segments), scored, with_likeliest);
        tokens.clear(), segments.clear(), scored.clear();
    };
    for (const Continuation& c : continuations) {
        assert(c.targets.size() == c.scores.size() && c.targets.size() <= c.tokens.size());
        assert(position_ + static_cast<int>(c.tokens.size()) <= spec_.n_ctx);
        const int n = static_cast<int>(c.tokens.size()),
                  unscored = n - static_cast<int>(c.targets.size());
        // A part that does not fit into a chunk is the first in the next one, where the keys and
        // values of the parts before it are still in the caches.
        for (int at = 0; at < n;) {
            const int row = static_cast<int>(tokens.size()), rows = std::min(n - at, chunk_ - row);
            segments.push_back({.first_row = row, .rows = rows, .position = position_ + at});
            for (const int end = at + rows; at < end; ++at) {
                const size_t i = static_cast<size_t>(std::max(0, at - unscored));
                if (at >= unscored)
                    scored.push_back({.row = static_cast<int>(tokens.size()),
                                      .target = c.targets[i],
                                      .score = &c.scores[i]});
                tokens.push_back(c.tokens[static_cast<size_t>(at)]);
            }
            if (static_cast<int>(tokens.size()) == chunk_) finish_chunk();
        }
    }
    finish_chunk();
}

void Generator::score_rows(Stream& stream, Tensor x, std::span<const ScoredRow> rows,
                           bool with_likeliest) {
    const size_t most = static_cast<size_t>(targets_.numel());
    for (; !rows.empty(); rows = rows.subspan(std::min(most, rows.size()))) {
        const std::span<const ScoredRow> now = rows.first(std::min(most, rows.size()));
        for (size_t begin = 0, end; begin < now.size(); begin = end) {  // rows next to each other
            for (end = begin + 1; end < now.size() && now[end].row == now[end - 1].row + 1;) ++end;
            const auto n = static_cast<int64_t>(end - begin);
            final_norm(stream, x.row_range(now[begin].row, n),
                       final_norm_.row_range(static_cast<int64_t>(begin), n));
        }
        score_normed(stream, now, with_likeliest);
    }
}

/// The first rows of final_norm_ belong to the tokens.
void Generator::score_normed(Stream& stream, std::span<const ScoredRow> rows, bool with_likeliest) {
    const Tensor normed = final_norm_.row_range(0, std::ssize(rows));
    std::ranges::transform(rows, host_targets_.as<int32_t>(), &ScoredRow::target);
    copy(stream, targets_.data, host_targets_.data, rows.size() * sizeof(int32_t));
    {
        const UnitLease weights =
            parameters_.weights.acquire(stream, registry_.unit_of(registry_.head));
        head_loss(stream, {.x = normed,
                           .w = weights.weight(registry_.head),
                           .logits = logits_scratch_,
                           .V = spec_.vocab_size,
                           .targets = targets_.as<int32_t>(),
                           .losses = losses_.as<float>(),
                           .softcap = static_cast<float>(spec_.head_softcap)});
    }
    copy(stream, host_losses_.data, losses_.data, rows.size() * sizeof(float));
    stream.synchronize();
    for (size_t i = 0; i < rows.size(); ++i) *rows[i].score = {.nats = host_losses_.as<float>()[i]};
    for (size_t i = 0; with_likeliest && i < rows.size(); ++i) {
        compute_logits(stream, normed.row_range(static_cast<int64_t>(i), 1));
        stream.synchronize();
        const std::span<const float> all = logits();
        rows[i].score->likeliest = std::ranges::max_element(all) - all.begin() == rows[i].target;
    }
}

/// Appends the keys and values of a segment's tokens to the cache of its layer, and attends to all
/// of them; then does the same for the next segment, whose tokens may take the same places.
void Generator::attend(Stream& stream, int layer, const Block& block,
                       std::span<const Segment> segments) {
    const BlockActivations& a = block.activations;
    const int H = block.layer.n_head, H_kv = block.layer.n_kv_head, D = block.layer.head_size;
    const size_t element = size_of(a.qkv.dtype),
                 row = static_cast<size_t>(H_kv) * static_cast<size_t>(D) * element;
    for (const Segment& segment : segments) {
        const int T = segment.rows;
        const Tensor qkv = a.qkv.row_range(segment.first_row, T),
                     att = a.att.row_range(segment.first_row, T);
        for (int part = 0; part < 2; ++part)
            copy_rows(stream, {.to = static_cast<char*>(cache(layer, part).data) +
                                     static_cast<size_t>(segment.position) * row,
                               .to_stride = row,
                               .from = heads_view(qkv, H + part * H_kv, T, D).data,
                               .from_stride = static_cast<size_t>(qkv.cols()) * element,
                               .row_bytes = row,
                               .rows = T});
        attention_forward(stream, {.shape = attention_shape(block.layer, T, segment.position),
                                   .q = heads_view(qkv, 0, T, D),
                                   .k = heads_view(cache(layer, 0), 0, spec_.n_ctx, D),
                                   .v = heads_view(cache(layer, 1), 0, spec_.n_ctx, D),
                                   .out = heads_view(att, 0, T, D),
                                   .lse = nullptr,
                                   .sinks = block.weight(block.parameters.sinks)});
    }
}

Tensor Generator::compute(Stream& stream, std::span<const int32_t> tokens,
                          std::span<const Segment> segments, const Watcher* watcher) {
    const int T = static_cast<int>(tokens.size());
    Tensor x = activations_.x.row_range(0, T), out = x_next_.row_range(0, T);

    stream.synchronize();  // the previous chunk has been copied
    std::copy(tokens.begin(), tokens.end(), host_tokens_.as<int32_t>());
    copy(stream, tokens_.data, host_tokens_.data, tokens.size_bytes());
    const bool is_one = segments.size() == 1;
    if (!is_one) {
        for (const Segment& segment : segments)
            std::fill_n(host_shifts_.as<int32_t>() + segment.first_row, segment.rows,
                        segment.first_row - segment.position);
        copy(stream, shifts_.data, host_shifts_.data, tokens.size_bytes());
    }
    const int32_t* const shifts = is_one ? nullptr : shifts_.as<int32_t>();
    const int first_position = is_one ? segments[0].position : 0;
    {
        const UnitLease weights =
            parameters_.weights.acquire(stream, registry_.unit_of(registry_.tokens));
        embedding_forward(stream, {.out = x.reshaped({1, T, spec_.n_embd}),
                                   .tokens = tokens_.as<int32_t>(),
                                   .w = weights.weight(registry_.tokens),
                                   .positions = weights.weight(registry_.positions),
                                   .doc_start = shifts,
                                   .first_position = first_position});
    }
    for (int l = 0; l < spec_.n_layer; ++l) {
        const BlockParameters& p = registry_.blocks[static_cast<size_t>(l)];
        const LayerSpec layer = spec_.layer(l);
        const UnitLease weights = parameters_.weights.acquire(stream, registry_.unit_of(p.norm1_w));
        RopeShape rope = rope_shape(layer, parameters_.dtype(), 1, T);
        rope.first_position = first_position;
        rope.doc_start = shifts;
        if (layer.is_rotary) rope.table = rotary_.get(stream);
        BlockActivations a;
        a.x = x;
        for (const Activation& of : block_activations(layer, parameters_.dtype()))
            if (!of.in_training_only)
                a.*of.member = Tensor((activations_.*of.member).data, of.dtype,
                                      {of.rows_with(T, T, 1), of.width});
        const Block block{.layer = layer,
                          .residual = residual_,
                          .weights = weights,
                          .parameters = p,
                          .activations = a,
                          .rope = rope,
                          .attention = attention_shape(layer, T, segments[0].position),
                          .experts = {.lease = [&](Stream& s) {
                              return parameters_.weights.acquire(s, registry_.unit_of(p.down_w));
                          }}};
        block_forward(stream, block, out,
                      [&](Stream& s, const Block& of) { attend(s, l, of, segments); });
        if (watcher) watcher->block(stream, l, block, out);
        std::swap(x, out);
    }
    return x;
}

void Generator::final_norm(Stream& stream, Tensor x, Tensor out) {
    const UnitLease weights =
        parameters_.weights.acquire(stream, registry_.unit_of(registry_.final_norm_w));
    norm_forward(stream, {.norm = spec_.norm,
                          .out = out,
                          .stats = {},
                          .x = x,
                          .w = weights.weight(registry_.final_norm_w),
                          .b = weights.weight(registry_.final_norm_b),
                          .epsilon = static_cast<float>(spec_.norm_epsilon)});
}

void Generator::compute_logits(Stream& stream, Tensor normed) {
    const UnitLease weights =
        parameters_.weights.acquire(stream, registry_.unit_of(registry_.head));
    head_logits(stream, {.out = logits_,
                         .x = normed,
                         .w = weights.weight(registry_.head),
                         .logits = logits_scratch_.row_range(0, 1),
                         .softcap = static_cast<float>(spec_.head_softcap)});
    copy(stream, host_logits_.data, logits_.data, logits_.bytes());
}

}  // namespace train_gpt
