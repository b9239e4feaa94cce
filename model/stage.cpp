#include "model/stage.h"

#include <algorithm>
#include <cassert>
#include <cmath>

#include "device/copy.h"
#include "device/trace.h"
#include "kernels/embedding.h"
#include "kernels/head_loss.h"
#include "kernels/linear/linear.h"
#include "kernels/norm.h"

namespace train_gpt {

namespace {

// The limit for the logits of one chunk of rows. With more rows the head runs in several chunks,
// each of which reads and writes the whole gradient of its weight.
size_t logits_bytes_limit(const Device& device) {
    return size_t{device.is_cuda() ? 2048u : 256u} << 20;
}

}  // namespace

Stage::Stage(const DecoderSpec& spec, const Registry& registry, const StageOptions& options,
             ParameterStore& parameters, Arena& arena)
    : spec_(spec),
      part_(tensor_part(spec, options.tensor ? options.tensor->size() : 1)),
      registry_(registry),
      options_(options),
      parameters_(parameters),
      tensor_(options.tensor ? *options.tensor : alone_),
      context_(options.context ? *options.context : alone_with_sequences_),
      slots_(static_cast<size_t>(options.slots)),
      rotary_(spec, sequence_length(), arena, Purpose::buffers) {
    tensor_.require_even(tokens(), "tokens of a micro-batch", context_.size());
    const DType dtype = parameters_.dtype();
    if (is_split()) {
        const int64_t M = tokens(), C = spec_.n_embd;
        products_ = arena.tensor(dtype, {M, C}, Purpose::buffers);
        gathered_ = arena.tensor(dtype, {M, C}, Purpose::buffers);
        added_up_ = arena.tensor(dtype, {tensor_.rows_of_rank(M), C}, Purpose::buffers);
        bias_ = arena.tensor(dtype, {C}, Purpose::buffers);
    }
    if (context_.is_split())
        context_attention_.emplace(context_, attention_shape({}), arena,
                                   options_.use == ParameterStore::Use::training);
    take_activations(arena);
    if (registry_.ends_model()) {
        const int64_t M = tokens(), Vp = padded_vocabulary();
        const auto limit = static_cast<int64_t>(logits_bytes_limit(arena.device()));
        const int64_t rows_that_fit =
            std::max<int64_t>(limit / (Vp * static_cast<int64_t>(size_of(dtype))), 1);
        const int64_t chunks = (M + rows_that_fit - 1) / rows_that_fit;
        logits_ = arena.tensor(dtype, {(M + chunks - 1) / chunks, Vp}, Purpose::buffers);
        losses_ = arena.tensor(DType::fp32, {M}, Purpose::buffers);
        if (is_split()) {
            const int64_t rows = logits_.rows();
            stats_ = arena.tensor(DType::fp32, {rows, 3}, Purpose::buffers);
            all_stats_ = arena.tensor(DType::fp32, {tensor_.size() * rows, 3}, Purpose::buffers);
        }
    }
    if (options_.use == ParameterStore::Use::training) take_gradients(arena);
}

Range Stage::vocabulary(int parameter) const {
    const Parameter& p = registry_.parameters[static_cast<size_t>(parameter)];
    return part_of(p, p.held_by.rank, p.held_by.ranks)[0];
}

int64_t Stage::padded_vocabulary() const {
    const int64_t whole = tensor_.size() * vocab_multiple;
    return (spec_.vocab_size + whole - 1) / whole * vocab_multiple;
}

void Stage::take_activations(Arena& arena) {
    const int64_t C = spec_.n_embd, F = part_.n_ff, M = tokens();
    const DType dtype = parameters_.dtype();
    const bool training = options_.use == ParameterStore::Use::training;
    const auto take = [&](DType type, int64_t cols) {
        return arena.tensor(type, {M, cols}, Purpose::activations);
    };
    const auto take_rows = [&](DType type, int64_t cols) {
        return arena.tensor(type, {tensor_.rows_of_rank(M), cols}, Purpose::activations);
    };

    // In training, each block of each slot keeps its own activations, except that all share the
    // tensors that are recomputed. In inference all blocks share all tensors, except that their
    // inputs x alternate between two. What backward_weights() reads is kept until then.
    const bool share_all = !training || options_.recompute == Recompute::block;
    const bool share_elementwise = share_all || options_.recompute == Recompute::elementwise;
    const bool share_weight_inputs = !options_.backward_apart;
    // Norms' outputs of all rows are either kept with the other activations, or gathered twice.
    const bool keeps_gathered =
        !is_split() || tensor_.options().keep_gathered || (share_all && share_weight_inputs);
    const bool share_norms =
        share_weight_inputs && (is_split() && keeps_gathered ? share_all : share_elementwise);
    BlockActivations* first = nullptr;
    for (Slot& slot : slots_) {
        slot.blocks.resize(static_cast<size_t>(layers()));
        for (size_t l = 0; l < slot.blocks.size(); ++l) {
            BlockActivations& a = slot.blocks[l];
            a.x = !training && l >= 2 ? slot.blocks[l - 2].x : take_rows(dtype, C);
            const auto kept = [&](Tensor BlockActivations::*member, DType type, int64_t cols,
                                  bool shared) {
                a.*member = first && shared ? first->*member : take(type, cols);
            };
            const auto kept_rows = [&](Tensor BlockActivations::*member, DType type, int64_t cols,
                                       bool shared) {
                a.*member = first && shared ? first->*member : take_rows(type, cols);
            };
            const auto kept_norm = [&](Tensor BlockActivations::*all,
                                       Tensor BlockActivations::*rows) {
                if (keeps_gathered) return kept(all, dtype, C, share_norms);
                a.*all = gathered_;
                kept_rows(rows, dtype, C, share_norms);
            };
            using A = BlockActivations;
            kept_norm(&A::norm1, &A::norm1_rows);
            kept_rows(&A::stats1, DType::fp32, 2, share_all);
            kept(&A::qkv, dtype, part_.qkv_width(), share_all);
            if (training && spec_.qk_norm)
                kept(&A::rotated, dtype, (part_.n_head + part_.n_kv_head) * part_.head_size,
                     share_elementwise);
            kept(&A::att, dtype, part_.attention_width(), share_all && share_weight_inputs);
            kept(&A::lse, DType::fp32, part_.n_head, share_all);
            kept_rows(&A::x_mid, dtype, C, share_all);
            kept_norm(&A::norm2, &A::norm2_rows);
            kept_rows(&A::stats2, DType::fp32, 2, share_all);
            kept(&A::preact, dtype, part_.up_width(), share_all);
            kept(&A::hidden, dtype, F, share_elementwise && share_weight_inputs);
            a.products = products_;
            a.added_up = added_up_;
            if (!first) first = &a;
        }
        if (!registry_.ends_model()) continue;
        slot.out = take_rows(dtype, C);
        slot.final_norm = take_rows(dtype, C);
        slot.final_stats = take_rows(DType::fp32, 2);
    }
}

void Stage::take_gradients(Arena& arena) {
    const int64_t C = spec_.n_embd, M = tokens(), held = tensor_.rows_of_rank(M);
    const int64_t width = part_.attention_width(), qkv = part_.qkv_width(), F = part_.n_ff,
                  up = part_.up_width();
    const bool gated = spec_.mlp == Mlp::swiglu, apart = options_.backward_apart;
    const DType dtype = parameters_.dtype();
    const auto take = [&](int64_t cols) {
        return arena.tensor(dtype, {M, cols}, Purpose::buffers);
    };
    const auto take_rows = [&](int64_t cols) {
        return arena.tensor(dtype, {held, cols}, Purpose::buffers);
    };
    const auto view = [&](const Tensor& memory, int64_t cols) {
        return Tensor(memory.data, dtype, {M, cols});
    };
    dres_ = take_rows(C);
    const Tensor narrow = arena.tensor(dtype, {std::max(held * C, M * width)}, Purpose::buffers);
    dy_ = Tensor(narrow.data, dtype, {held, C});
    // With SwiGLU, dup takes preact's place, unless it must last longer than preact.
    const Tensor wide = !apart ? take(std::max(qkv, F)) : gated ? take(F) : Tensor{};
    for (Slot& slot : slots_) {
        slot.gradients.assign(slot.blocks.size(), {.dres = dres_,
                                                   .dy = dy_,
                                                   .datt = view(narrow, width),
                                                   .dhidden = gated ? view(wide, F) : Tensor{},
                                                   .dup = gated ? Tensor{} : view(wide, F),
                                                   .dqkv = view(wide, qkv)});
        for (size_t l = 0; gated && l < slot.blocks.size(); ++l)
            slot.gradients[l].dup = slot.blocks[l].preact;
        if (!apart) continue;
        for (size_t l = 0; l < slot.gradients.size(); ++l) {
            BlockGradients& g = slot.gradients[l];
            g.dup = take(up), g.dqkv = take(qkv), g.dout = take_rows(C), g.dmid = take_rows(C);
            // Where gradients are reduced in every micro-batch, a block's must all be written
            // together, before those of another micro-batch.
            if (parameters_.gradients.stand_alone())
                g.early = arena.tensor(DType::fp32,
                                       {early_gradients(part_, registry_.blocks[l]).back().end()},
                                       Purpose::buffers);
        }
        if (registry_.begins_model()) slot.dembedding = take_rows(C);
    }
}

size_t Stage::scratch_bytes(const Stream& stream) const {
    const int64_t C = spec_.n_embd, F = part_.n_ff, M = tokens(), width = part_.attention_width();
    const DType dtype = parameters_.dtype();
    // Only whether batches have doc_start matters here.
    const int32_t any = 0;
    const TokenBatch batch{.doc_start = options_.document_mask ? &any : nullptr};
    const auto linear = [&](int64_t out, int64_t in) {
        return linear_scratch_bytes(stream, dtype, M, out, in);
    };
    size_t most = std::max(
        {linear(part_.qkv_width(), C), linear(C, width), linear(part_.up_width(), C), linear(C, F),
         norm_scratch_bytes(stream, M, C),
         context_attention_ ? context_attention_->scratch_bytes(stream, attention_shape(batch))
                            : attention_scratch_bytes(stream, attention_shape(batch))});
    if (spec_.qk_norm)
        most = std::max(
            most, rope_scratch_bytes(stream, rope_shape(part_, dtype, options_.B, options_.T)));
    const int64_t Vp = padded_vocabulary();
    if (registry_.begins_model()) most = std::max(most, embedding_scratch_bytes(stream, M, Vp));
    if (registry_.ends_model())
        most = std::max(most, head_loss_scratch_bytes(stream, dtype, logits_.shape[0], Vp, C));
    return most;
}

AttentionShape Stage::attention_shape(const TokenBatch& batch) const {
    return {.dtype = parameters_.dtype(),
            .B = options_.B,
            .T = options_.T,
            .S = options_.T,
            .H = part_.n_head,
            .H_kv = part_.n_kv_head,
            .D = part_.head_size,
            .scale = 1.0f / std::sqrt(static_cast<float>(spec_.head_size)),
            .doc_start = batch.doc_start};
}

Block Stage::block(Stream& stream, const UnitLease& weights, const Slot& slot, int layer,
                   const TokenBatch& batch) {
    const size_t i = static_cast<size_t>(layer);
    RopeShape rope = rope_shape(part_, parameters_.dtype(), options_.B, options_.T);
    if (spec_.is_rotary())
        rope.table = rotary_.get(stream), rope.doc_start = batch.starts_of_positions();
    return {.spec = part_,
            .tensor = tensor_,
            .weights = weights,
            .parameters = registry_.blocks[i],
            .activations = slot.blocks[i],
            .rope = rope,
            .attention = attention_shape(batch),
            .input = {},
            .context = context_attention_ ? &*context_attention_ : nullptr};
}

void Stage::forward(Stream& stream, int slot_index, const TokenBatch& batch, Tensor in,
                    Tensor out) {
    assert(bool(in) != registry_.begins_model() && bool(out) != registry_.ends_model());
    Slot& slot = this->slot(slot_index);
    if (registry_.begins_model())
        embed(stream, slot.blocks[0].x, batch);
    else
        copy(stream, slot.blocks[0].x.data, in.data, in.bytes());
    Addends input;  // of the next block, among tensor-parallel ranks
    for (int l = 0; l < layers(); ++l) {
        const TraceSpan span(TraceTrack::device, stream, "forward layer",
                             registry_.first_layer + l);
        const int unit = registry_.unit_of_block(l), last = registry_.last_unit();
        const UnitLease weights = parameters_.weights.acquire(stream, unit);
        if (unit < last) parameters_.weights.prefetch(stream, unit + 1, last);
        const size_t i = static_cast<size_t>(l);
        const Tensor next = is_split()               ? added_up_
                            : l + 1 < layers()       ? slot.blocks[i + 1].x
                            : registry_.ends_model() ? slot.out
                                                     : out;
        Block block = this->block(stream, weights, slot, l, batch);
        block.input = input;
        block_forward(stream, block, next);
        if (!is_split()) continue;
        input = {.sum = added_up_, .residual = slot.blocks[i].x_mid};
        // The lease of its unit ends here.
        if (const Tensor bias = weights.weight(registry_.blocks[i].down_b)) {
            copy(stream, bias_.data, bias.data, bias.bytes());
            input.bias = bias_;
        }
        if (l + 1 == layers() && !registry_.ends_model()) add_residual(stream, block, input, out);
    }
    if (registry_.ends_model()) final_norm(stream, slot, input);
}

/// out = the sum of a stage's last addends, by a norm whose output is not used.
void Stage::add_residual(Stream& stream, const Block& block, const Addends& addends, Tensor out) {
    tensor_.wait(stream, TensorGroup::Lane::sums);
    norm_forward(stream, {.norm = spec_.norm,
                          .out = products_.row_range(0, out.rows()),
                          .stats = {},
                          .x = addends.sum,
                          .w = block.weights.weight(block.parameters.norm2_w),
                          .b = block.weights.weight(block.parameters.norm2_b),
                          .residual = addends.residual,
                          .bias = addends.bias,
                          .x_out = out,
                          .epsilon = static_cast<float>(spec_.norm_epsilon)});
}

void Stage::final_norm(Stream& stream, const Slot& slot, const Addends& input) {
    const UnitLease weights =
        parameters_.weights.acquire(stream, registry_.unit_of(registry_.final_norm_w));
    tensor_.wait(stream, TensorGroup::Lane::sums);
    norm_forward(stream, {.norm = spec_.norm,
                          .out = slot.final_norm,
                          .stats = slot.final_stats,
                          .x = input.sum ? input.sum : slot.out,
                          .w = weights.weight(registry_.final_norm_w),
                          .b = weights.weight(registry_.final_norm_b),
                          .residual = input.residual,
                          .bias = input.bias,
                          .x_out = input.sum ? slot.out : Tensor{},
                          .epsilon = static_cast<float>(spec_.norm_epsilon)});
}

/// `held` = this rank's rows of the sum of the ranks' products_.
void Stage::add_up(Stream& stream, Tensor held) {
    for (int chunk = 0; chunk < tensor_.chunks(); ++chunk)
        tensor_.add_up(stream, held, products_, chunk);
    tensor_.wait(stream, TensorGroup::Lane::sums);
}

/// All rows, in `all`, of what the ranks hold; `held` itself without other ranks.
Tensor Stage::gathered(Stream& stream, Tensor all, Tensor held) {
    if (!is_split()) return held;
    for (int chunk = 0; chunk < tensor_.chunks(); ++chunk)
        tensor_.gather(stream, TensorGroup::Lane::inputs, all, held, chunk);
    tensor_.wait(stream, TensorGroup::Lane::inputs);
    return all;
}

void Stage::embed(Stream& stream, Tensor out, const TokenBatch& batch) {
    const TraceSpan span(TraceTrack::device, stream, "embedding");
    const UnitLease weights =
        parameters_.weights.acquire(stream, registry_.unit_of(registry_.tokens));
    parameters_.weights.prefetch(stream, registry_.unit_of_block(0), registry_.last_unit());
    const Tensor to = is_split() ? products_ : out;
    const bool adds_positions = tensor_.rank() == 0;  // once
    embedding_forward(stream,
                      {.out = to.reshaped({options_.B, options_.T, spec_.n_embd}),
                       .tokens = batch.tokens,
                       .w = weights.weight(registry_.tokens),
                       .positions = adds_positions ? weights.weight(registry_.positions) : Tensor{},
                       .doc_start = batch.starts_of_positions(),
                       .first_token = vocabulary(registry_.tokens).first});
    if (is_split()) add_up(stream, out);
}

void Stage::head(Stream& stream, const Slot& slot, const TokenBatch& batch, bool backward) {
    const TraceSpan span(TraceTrack::device, stream, "head");
    const Tensor x = gathered(stream, gathered_, slot.final_norm);
    const UnitLease weights =
        parameters_.weights.acquire(stream, registry_.unit_of(registry_.head));
    const Range part = vocabulary(registry_.head);
    HeadLoss args{
        .x = x,
        .w = weights.weight(registry_.head),
        .logits = logits_,
        .V = part.n,
        .targets = batch.targets,
        .losses = losses_.as<float>(),
        .dx = backward ? is_split() ? products_ : dy_ : Tensor{},
        .dw = backward ? parameters_.gradients.sink(stream, registry_.head) : GradientSink{},
        .z_loss = options_.z_loss,
        .first_column = part.first};
    if (is_split()) {
        args.stats = stats_;
        args.combine = [&](Stream& s, Tensor stats) {
            tensor_.gather_numbers(s, all_stats_.as<float>(), stats.as<float>(), stats.numel());
            combine_softmax_stats(
                s, stats, {all_stats_.data, DType::fp32, {tensor_.size(), stats.rows(), 3}});
        };
    }
    head_loss(stream, args);
    if (is_split() && backward) add_up(stream, dy_);
}

void Stage::evaluate_head(Stream& stream, int slot_index, const TokenBatch& batch) {
    head(stream, slot(slot_index), batch, false);
}

void Stage::next_token_logits(Stream& stream, int slot_index, int64_t position, Tensor out) {
    // Other context-parallel ranks compute those of another token.
    const auto [owner, row] = context_.place().place_of(position, sequence_length());
    const Tensor x = gathered(stream, gathered_, slot(slot_index).final_norm);
    const UnitLease weights =
        parameters_.weights.acquire(stream, registry_.unit_of(registry_.head));
    const int64_t Vp = padded_vocabulary();
    // A rank's part begins where those of the ranks before end.
    const Tensor part(out.as<float>() + tensor_.rank() * Vp, DType::fp32, {1, Vp});
    head_logits(stream, part, x.row_range(row, 1), weights.weight(registry_.head), logits_);
    if (is_split()) tensor_.gather_numbers(stream, out.as<float>(), part.as<float>(), Vp);
    context_.broadcast(stream, out, owner);
}

void Stage::backward_head(Stream& stream, const Slot& slot, const TokenBatch& batch) {
    head(stream, slot, batch, true);
    const int unit = registry_.unit_of(registry_.final_norm_w);
    {
        const UnitLease weights = parameters_.weights.acquire(stream, unit);
        parameters_.weights.prefetch(stream, unit - 1, registry_.first_unit());
        norm_backward(stream, {.norm = spec_.norm,
                               .dres = dres_,
                               .dw = parameters_.gradients.sink(stream, registry_.final_norm_w),
                               .db = parameters_.gradients.sink(stream, registry_.final_norm_b),
                               .dy = dy_,
                               .x = slot.out,
                               .w = weights.weight(registry_.final_norm_w),
                               .stats = slot.final_stats,
                               .overwrite_dres = true});
    }
    parameters_.gradients.ready(stream, unit);
}

void Stage::backward_blocks(Stream& stream, Slot& slot, const TokenBatch& batch, Backward part) {
    for (int l = layers() - 1; l >= 0; --l) {
        const TraceSpan span(TraceTrack::device, stream, "backward layer",
                             registry_.first_layer + l);
        const int unit = registry_.unit_of_block(l), last = registry_.first_unit();
        {
            // Gradients of weights are computed from activations and gradients only.
            const UnitLease weights =
                part == Backward::weights ? UnitLease() : parameters_.weights.acquire(stream, unit);
            if (part != Backward::weights && unit > last)
                parameters_.weights.prefetch(stream, unit - 1, last);
            block_backward(stream, parameters_.gradients, block(stream, weights, slot, l, batch),
                           slot.gradients[static_cast<size_t>(l)], options_.recompute, part);
        }
        if (completes(part, unit)) parameters_.gradients.ready(stream, unit);
    }
}

void Stage::backward_embedding(Stream& stream, Tensor held, const TokenBatch& batch) {
    const TraceSpan span(TraceTrack::device, stream, "embedding");
    const Tensor dout = gathered(stream, products_, held);
    embedding_backward(stream,
                       {.dw = parameters_.gradients.sink(stream, registry_.tokens),
                        .dpositions = parameters_.gradients.sink(stream, registry_.positions),
                        .dout = dout.reshaped({options_.B, options_.T, spec_.n_embd}),
                        .tokens = batch.tokens,
                        .vocab_rows = padded_vocabulary(),
                        .n_ctx = spec_.n_ctx,
                        .doc_start = batch.starts_of_positions(),
                        .first_token = vocabulary(registry_.tokens).first});
    parameters_.gradients.ready(stream, registry_.unit_of(registry_.tokens));
}

void Stage::backward_from_end(Stream& stream, Slot& slot, const TokenBatch& batch, Tensor dout,
                              Backward part) {
    assert(bool(dout) != registry_.ends_model());
    if (registry_.ends_model())
        backward_head(stream, slot, batch);
    else
        copy(stream, dres_.data, dout.data, dout.bytes());
    backward_blocks(stream, slot, batch, part);
}

void Stage::backward(Stream& stream, int slot_index, const TokenBatch& batch, Tensor dout,
                     Tensor din) {
    assert(!options_.backward_apart && bool(din) != registry_.begins_model());
    backward_from_end(stream, slot(slot_index), batch, dout, Backward::both);
    if (registry_.begins_model())
        backward_embedding(stream, dres_, batch);
    else
        copy(stream, din.data, dres_.data, dres_.bytes());
}

void Stage::backward_inputs(Stream& stream, int slot_index, const TokenBatch& batch, Tensor dout,
                            Tensor din) {
    assert(options_.backward_apart && bool(din) != registry_.begins_model());
    Slot& slot = this->slot(slot_index);
    backward_from_end(stream, slot, batch, dout, Backward::inputs);
    const Tensor to = registry_.begins_model() ? slot.dembedding : din;
    copy(stream, to.data, dres_.data, dres_.bytes());
}

void Stage::backward_weights(Stream& stream, int slot_index, const TokenBatch& batch) {
    assert(options_.backward_apart);
    Slot& slot = this->slot(slot_index);
    backward_blocks(stream, slot, batch, Backward::weights);
    if (registry_.begins_model()) backward_embedding(stream, slot.dembedding, batch);
}

bool Stage::completes(Backward part, int unit) const {
    const bool is_head = registry_.ends_model() && unit == registry_.last_unit();
    return part != (is_head ? Backward::weights : Backward::inputs);
}

void Stage::skip_forward(Stream& stream) {
    if (!parameters_.gradients.stand_alone()) return;
    // The leases of a pass, in its order, since they gather weights with ZeRO-3.
    const int last = registry_.last_unit();
    for (int unit = registry_.first_unit(); unit <= last; ++unit) {
        const UnitLease weights = parameters_.weights.acquire(stream, unit);
        if (unit < last) parameters_.weights.prefetch(stream, unit + 1, last);
    }
}

void Stage::skip_backward(Stream& stream, Backward part) {
    if (!parameters_.gradients.stand_alone()) return;
    const int last = registry_.first_unit();
    for (int unit = registry_.last_unit(); unit >= last; --unit) {
        if (part != Backward::weights) {
            const UnitLease weights = parameters_.weights.acquire(stream, unit);
            if (unit > last) parameters_.weights.prefetch(stream, unit - 1, last);
        }
        if (completes(part, unit)) parameters_.gradients.skip(stream, unit);
    }
}

}  // namespace train_gpt
