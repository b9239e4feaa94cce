#include "model/stage.h"

#include <cassert>

#include "device/copy.h"
#include "device/trace.h"
#include "kernels/embedding.h"
#include "kernels/head_loss.h"
#include "kernels/norm.h"

namespace train_gpt {

Stage::Stage(const DecoderSpec& spec, const Registry& registry, const StageOptions& options,
             ParameterStore& parameters, Arena& arena)
    : spec_(spec),
      part_(share_of_spec(spec, options.tensor ? options.tensor->size() : 1)),
      registry_(registry),
      options_(options),
      parameters_(parameters),
      tensor_(options.tensor ? *options.tensor : alone_),
      context_(options.context ? *options.context : alone_with_sequences_),
      slots_(static_cast<size_t>(options.slots)),
      rotary_(spec, sequence_length(), arena, Purpose::buffers),
      residual_(tensor_,
                {.rows = tokens(),
                 .channels = spec.n_embd,
                 .dtype = parameters.dtype(),
                 .norm = spec.norm,
                 .norm_epsilon = spec.norm_epsilon},
                arena) {
    tensor_.require_even(tokens(), "tokens of a micro-batch", context_.size());
    if (context_.is_split()) {
        LayerSpec widest = layer(0);
        for (int l = 1; l < layers(); ++l)
            if (layer(l).kv_width() > widest.kv_width()) widest = layer(l);
        context_attention_.emplace(context_, attention_shape(widest, {}), arena, is_training());
    }
    take_activations(arena);
    if (registry_.ends_model()) take_head(arena);
    if (is_training()) take_gradients(arena);
    if (context_.is_split() && spec.experts && is_training())
        counts_of_ranks_ = arena.tensor(
            DType::int32, {int64_t{context_.size()} * options.B, spec.experts.n_expert},
            Purpose::buffers);
}

Range Stage::vocabulary(int parameter) const {
    const Parameter& p = registry_.parameters[static_cast<size_t>(parameter)];
    return part_of(p, p.held_by.rank, p.held_by.ranks)[0];
}

int64_t Stage::padded_vocabulary() const {
    return part_extent(spec_.vocab_size, vocab_multiple, tensor_.size());
}

AttentionShape Stage::attention_shape(const LayerSpec& layer, const TokenBatch& batch) const {
    AttentionShape shape =
        train_gpt::attention_shape(layer, parameters_.dtype(), options_.B, options_.T, options_.T);
    shape.doc_start = batch.doc_start;
    return shape;
}

/// Evaluation and samples are not in fp8.
static Weights::For use_of(const TokenBatch& batch) {
    return batch.trains ? Weights::For::training : Weights::For::other;
}

Block Stage::block(Stream& stream, const UnitLease& weights, const Slot& slot, int l,
                   const TokenBatch& batch) {
    const size_t i = static_cast<size_t>(l);
    const LayerSpec of = layer(l);
    RopeShape rope = rope_shape(of, parameters_.dtype(), options_.B, options_.T);
    if (of.is_rotary)
        rope.table = rotary_.get(stream), rope.doc_start = batch.starts_of_positions();
    // Among tensor-parallel ranks, norms' outputs are gathered in the compute dtype.
    const bool rounds = batch.trains && options_.fp8 && stream.device.is_cuda() &&
                        !residual_.is_split() && !fp8_was_refused(stream);
    return {
        .layer = of,
        .residual = residual_,
        .weights = weights,
        .parameters = registry_.blocks[i],
        .activations = slot.blocks[i],
        .rope = rope,
        .attention = attention_shape(of, batch),
        .input = {},
        .context = context_attention_ ? &*context_attention_ : nullptr,
        .experts = experts_of(l, use_of(batch)),
        .routing = routing_of(l, batch),
        .fp8 = batch.trains ? options_.fp8 : nullptr,
        .rounds_hidden = rounds,
        .rounds_norms = rounds && norm_rounds(stream, parameters_.dtype(), tokens(), spec_.n_embd)};
}

ExpertUnit Stage::experts_of(int l, Weights::For use) {
    const int unit = registry_.unit_of_experts(l), others = registry_.unit_of_block(l),
              last = registry_.first_unit();
    if (unit == others) return {};
    return {
        .lease = [this, unit, use](Stream& s) { return parameters_.weights.acquire(s, unit, use); },
        .released =
            [this, others, last](Stream& s) {
                if (others > last) parameters_.weights.prefetch(s, others - 1, last);
            },
        .ready = [this, unit](Stream& s) { parameters_.gradients.ready(s, unit); }};
}

Routing Stage::routing_of(int l, const TokenBatch& batch) const {
    const int layer = registry_.first_layer + l;
    if (!is_training() || !options_.routers || !spec_.has_experts(layer)) return {};
    int router = 0;
    for (int i = 0; i < layer; ++i) router += spec_.has_experts(i);
    return {.counts = options_.routers,
            .router = router,
            .losses = options_.router_losses,
            .capacity = batch.trains ? spec_.layer(layer).experts.most_routes(options_.T) : 0,
            .context = &context_,
            .counts_of_ranks = counts_of_ranks_};
}

void Stage::forward(Stream& stream, int slot_index, const TokenBatch& batch, Tensor in, Tensor out,
                    bool backward_follows) {
    assert(bool(in) != registry_.begins_model() && bool(out) != registry_.ends_model());
    Slot& slot = this->slot(slot_index);
    const auto make_room = [&](int l) {
        if (inputs_ && l < layers()) inputs_->make_room(stream, slot_index, l);
    };
    make_room(0);
    if (registry_.begins_model())
        embed(stream, slot.blocks[0].x, batch);
    else
        copy(stream, slot.blocks[0].x.data, in.data, in.bytes());
    const Tensor last_out = registry_.ends_model() ? slot.out : out;
    Addends input;  // of the next block
    for (int l = 0; l < layers(); ++l) {
        const TraceSpan span(TraceTrack::device, stream, "forward layer",
                             registry_.first_layer + l);
        const int unit = registry_.unit_of_block(l), last = registry_.last_unit();
        const UnitLease weights = parameters_.weights.acquire(stream, unit, use_of(batch));
        if (unit < last) parameters_.weights.prefetch(stream, unit + 1, last);
        Block block = this->block(stream, weights, slot, l, batch);
        block.input = input;
        const bool is_last = l + 1 == layers();
        make_room(l + 1);
        input = block_forward(stream, block,
                              is_last ? last_out : slot.blocks[static_cast<size_t>(l) + 1].x);
        if (inputs_ && backward_follows) inputs_->store(stream, slot_index, l);
    }
    if (registry_.ends_model())
        final_norm(stream, slot, input);
    else if (input)
        residual_.settle(stream, input, out);
}

StreamNorm Stage::final_norm_of(const Slot& slot, const UnitLease& weights) const {
    return {.out = slot.final_norm,
            .stats = slot.final_stats,
            .x = slot.out,
            .w = weights.weight(registry_.final_norm_w),
            .b = weights.weight(registry_.final_norm_b)};
}

void Stage::final_norm(Stream& stream, const Slot& slot, const Addends& input) {
    const UnitLease weights =
        parameters_.weights.acquire(stream, registry_.unit_of(registry_.final_norm_w));
    residual_.norm_of_rows(stream, final_norm_of(slot, weights), input);
}

void Stage::embed(Stream& stream, Tensor out, const TokenBatch& batch) {
    const TraceSpan span(TraceTrack::device, stream, "embedding");
    const UnitLease weights =
        parameters_.weights.acquire(stream, registry_.unit_of(registry_.tokens));
    parameters_.weights.prefetch(stream, registry_.unit_of_block(0), registry_.last_unit());
    const Tensor to = residual_.partial(out);
    const bool adds_positions = tensor_.rank() == 0;  // once
    embedding_forward(stream,
                      {.out = to.reshaped({options_.B, options_.T, spec_.n_embd}),
                       .tokens = batch.tokens,
                       .w = weights.weight(registry_.tokens),
                       .positions = adds_positions ? weights.weight(registry_.positions) : Tensor{},
                       .doc_start = batch.starts_of_positions(),
                       .first_token = vocabulary(registry_.tokens).first});
    residual_.add_partials(stream, out);
}

void Stage::head(Stream& stream, const Slot& slot, const TokenBatch& batch, bool backward) {
    const TraceSpan span(TraceTrack::device, stream, "head");
    const Tensor x = residual_.gather(stream, slot.final_norm);
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
        .dx = backward ? residual_.partial(dy_) : Tensor{},
        .dw = backward ? parameters_.gradients.sink(stream, registry_.head) : GradientSink{},
        .z_loss = options_.z_loss,
        .softcap = static_cast<float>(spec_.head_softcap),
        .first_column = part.first};
    if (tensor_.is_split()) {
        args.stats = stats_;
        args.combine = [&](Stream& s, Tensor stats) {
            tensor_.gather_numbers(s, all_stats_.as<float>(), stats.as<float>(), stats.numel());
            combine_softmax_stats(
                s, stats, {all_stats_.data, DType::fp32, {tensor_.size(), stats.rows(), 3}});
        };
    }
    head_loss(stream, args);
    if (!backward) return;
    // With a tied head, the embedding's gradient has two contributions.
    parameters_.gradients.end_contribution(stream, registry_.unit_of(registry_.head));
    residual_.add_partials(stream, dy_);
}

void Stage::evaluate_head(Stream& stream, int slot_index, const TokenBatch& batch) {
    head(stream, slot(slot_index), batch, false);
}

void Stage::next_token_logits(Stream& stream, int slot_index, int64_t position, Tensor out) {
    // Other context-parallel ranks compute the logits of another token.
    const int length = sequence_length();
    const auto [owner, place] = context_.place().place_of(position % length, length);
    const int64_t row = position / length * options_.T + place;
    const Tensor x = residual_.gather(stream, slot(slot_index).final_norm);
    const UnitLease weights =
        parameters_.weights.acquire(stream, registry_.unit_of(registry_.head));
    const int64_t Vp = padded_vocabulary();
    // The ranks' parts follow each other in the order of ranks.
    const Tensor part(out.as<float>() + tensor_.rank() * Vp, DType::fp32, {1, Vp});
    head_logits(stream, {.out = part,
                         .x = x.row_range(row, 1),
                         .w = weights.weight(registry_.head),
                         .logits = logits_,
                         .softcap = static_cast<float>(spec_.head_softcap)});
    if (tensor_.is_split()) tensor_.gather_numbers(stream, out.as<float>(), part.as<float>(), Vp);
    context_.broadcast(stream, out, owner);
}

void Stage::backward_head(Stream& stream, const Slot& slot, const TokenBatch& batch) {
    head(stream, slot, batch, true);
    const int unit = registry_.unit_of(registry_.final_norm_w);
    {
        const UnitLease weights = parameters_.weights.acquire(stream, unit);
        parameters_.weights.prefetch(stream, unit - 1, registry_.first_unit());
        residual_.norm_backward(stream, final_norm_of(slot, weights),
                                {.dres = dres_,
                                 .dy = dy_,
                                 .dw = parameters_.gradients.sink(stream, registry_.final_norm_w),
                                 .db = parameters_.gradients.sink(stream, registry_.final_norm_b),
                                 .overwrite_dres = true});
    }
    parameters_.gradients.ready(stream, unit);
}

void Stage::backward_blocks(Stream& stream, int slot_index, const TokenBatch& batch,
                            Backward part) {
    Slot& slot = this->slot(slot_index);
    for (int l = layers() - 1; l >= 0; --l) {
        const TraceSpan span(TraceTrack::device, stream, "backward layer",
                             registry_.first_layer + l);
        const int unit = registry_.unit_of_block(l), last = registry_.first_unit();
        // Gradients of weights are computed from activations and gradients only: without weights
        // and blocks' inputs.
        const bool inputs = part != Backward::weights;
        if (inputs) {
            inputs_->fetch(stream, slot_index, l);
            for (const int next : {l - 1, l - 2}) inputs_->prefetch(stream, slot_index, next);
        }
        {
            const int experts = registry_.unit_of_experts(l);
            if (inputs && experts != unit) parameters_.weights.prefetch(stream, experts, last);
            const UnitLease weights =
                inputs ? parameters_.weights.acquire(stream, unit, use_of(batch)) : UnitLease();
            if (inputs && experts == unit && unit > last)
                parameters_.weights.prefetch(stream, unit - 1, last);
            block_backward(stream, parameters_.gradients, block(stream, weights, slot, l, batch),
                           slot.gradients[static_cast<size_t>(l)], options_.recompute, part);
        }
        if (completes(part, unit)) parameters_.gradients.ready(stream, unit);
    }
}

void Stage::backward_embedding(Stream& stream, Tensor held, const TokenBatch& batch) {
    const TraceSpan span(TraceTrack::device, stream, "embedding");
    const Tensor dout = residual_.gather_partial(stream, held);
    embedding_backward(stream,
                       {.dw = parameters_.gradients.sink_of_rows(stream, registry_.tokens),
                        .dpositions = parameters_.gradients.sink(stream, registry_.positions),
                        .dout = dout.reshaped({options_.B, options_.T, spec_.n_embd}),
                        .tokens = batch.tokens,
                        .vocab_rows = padded_vocabulary(),
                        .n_ctx = spec_.n_ctx,
                        .doc_start = batch.starts_of_positions(),
                        .first_token = vocabulary(registry_.tokens).first});
    parameters_.gradients.ready(stream, registry_.unit_of(registry_.tokens));
}

void Stage::backward_from_end(Stream& stream, int slot, const TokenBatch& batch, Tensor dout,
                              Backward part) {
    assert(bool(dout) != registry_.ends_model());
    for (const int l : {layers() - 1, layers() - 2}) inputs_->prefetch(stream, slot, l);
    if (registry_.ends_model())
        backward_head(stream, this->slot(slot), batch);
    else
        copy(stream, dres_.data, dout.data, dout.bytes());
    backward_blocks(stream, slot, batch, part);
}

void Stage::backward(Stream& stream, int slot_index, const TokenBatch& batch, Tensor dout,
                     Tensor din) {
    assert(!options_.backward_apart && bool(din) != registry_.begins_model());
    backward_from_end(stream, slot_index, batch, dout, Backward::both);
    if (registry_.begins_model())
        backward_embedding(stream, dres_, batch);
    else
        copy(stream, din.data, dres_.data, dres_.bytes());
}

void Stage::backward_inputs(Stream& stream, int slot_index, const TokenBatch& batch, Tensor dout,
                            Tensor din) {
    assert(options_.backward_apart && bool(din) != registry_.begins_model());
    Slot& slot = this->slot(slot_index);
    backward_from_end(stream, slot_index, batch, dout, Backward::inputs);
    const Tensor to = registry_.begins_model() ? slot.dembedding : din;
    copy(stream, to.data, dres_.data, dres_.bytes());
}

void Stage::backward_weights(Stream& stream, int slot_index, const TokenBatch& batch) {
    assert(options_.backward_apart);
    Slot& slot = this->slot(slot_index);
    backward_blocks(stream, slot_index, batch, Backward::weights);
    if (registry_.begins_model()) backward_embedding(stream, slot.dembedding, batch);
}

bool Stage::completes(Backward part, int unit) const {
    const bool is_head = registry_.ends_model() && unit == registry_.last_unit();
    return part != (is_head ? Backward::weights : Backward::inputs);
}

void Stage::skip_forward(Stream& stream) {
    if (!parameters_.gradients.reduces_each()) return;
    // The leases of a pass, in its order, since they gather weights with ZeRO-3.
    const int last = registry_.last_unit();
    for (int unit = registry_.first_unit(); unit <= last; ++unit) {
        const UnitLease weights = parameters_.weights.acquire(stream, unit);
        if (unit < last) parameters_.weights.prefetch(stream, unit + 1, last);
    }
}

void Stage::skip_backward(Stream& stream, Backward part) {
    if (!parameters_.gradients.reduces_each()) return;
    // The leases, prefetches and reductions of a pass, in its order.
    Weights& weights = parameters_.weights;
    const int last = registry_.first_unit();
    const auto prefetch_before = [&](int unit) {
        if (unit > last) weights.prefetch(stream, unit - 1, last);
    };
    for (int unit = registry_.last_unit(); unit >= last; --unit) {
        const int experts = is_of_experts(unit) ? unit-- : -1;
        if (part != Backward::weights) {
            if (experts >= 0) weights.prefetch(stream, experts, last);
            const UnitLease lease = weights.acquire(stream, unit);
            if (experts >= 0) weights.acquire(stream, experts);
            prefetch_before(unit);
        }
        for (const int written : {experts, unit})
            if (written >= 0 && completes(part, written))
                parameters_.gradients.skip(stream, written);
    }
}

bool Stage::is_of_experts(int unit) const {
    for (int l = 0; l < layers(); ++l)
        if (registry_.unit_of_experts(l) == unit) return unit != registry_.unit_of_block(l);
    return false;
}

}  // namespace train_gpt
