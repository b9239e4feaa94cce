// The memory of a Stage: what its passes keep, and the scratch memory of its kernels.
#include <algorithm>
#include <cassert>

#include "model/scratch.h"
#include "model/stage.h"

namespace train_gpt {

namespace {

// The limit for the logits of one chunk of rows. With more rows the head runs in several chunks,
// each of which reads and writes the whole gradient of its weight.
size_t logits_bytes_limit(const Device& device) {
    return size_t{device.is_cuda() ? 2048u : 256u} << 20;
}

}  // namespace

int64_t logits_rows(const Device& device, int64_t rows, int64_t vocabulary, DType dtype) {
    const int64_t bytes = vocabulary * static_cast<int64_t>(size_of(dtype)),
                  fitting = static_cast<int64_t>(logits_bytes_limit(device)) / bytes,
                  most = std::max<int64_t>(fitting, 1), chunks = (rows + most - 1) / most;
    return (rows + chunks - 1) / chunks;
}

void Stage::take_head(Arena& arena) {
    const DType dtype = parameters_.dtype();
    const int64_t M = tokens(), Vp = padded_vocabulary();
    logits_ =
        arena.tensor(dtype, {logits_rows(arena.device(), M, Vp, dtype), Vp}, Purpose::buffers);
    losses_ = arena.tensor(DType::fp32, {M}, Purpose::buffers);
    if (!tensor_.is_split()) return;
    const int64_t rows = logits_.rows();
    stats_ = arena.tensor(DType::fp32, {rows, 3}, Purpose::buffers);
    all_stats_ = arena.tensor(DType::fp32, {tensor_.size() * rows, 3}, Purpose::buffers);
}

void Stage::take_activations(Arena& arena) {
    const int64_t C = spec_.n_embd, M = tokens(), held = tensor_.rows_of_rank(M);
    const DType dtype = parameters_.dtype();
    const auto take = [&](DType type, int64_t rows, int64_t cols) {
        return arena.tensor(type, {rows, cols}, Purpose::activations);
    };
    // In training, each block of each slot keeps its own activations, except what is recomputed. In
    // inference all blocks share all tensors, except that their inputs x alternate between two.
    const bool training = is_training(), apart = options_.backward_apart;
    const Recompute level = training ? options_.recompute : Recompute::block;
    // Norms' outputs of all rows are either kept with the other activations, or gathered twice.
    const bool gathers_once =
        tensor_.options().keep_gathered || (level == Recompute::block && !apart);
    const Activations widest =
        widest_activations(part_, registry_.first_layer, registry_.first_layer + layers(), dtype);
    // Elements of each token, or sequence, in the memory that blocks share
    const auto most_of = [&](Tensor BlockActivations::*member) {
        const Activation& most = *std::ranges::find(widest, member, &Activation::member);
        return most.each * most.width;
    };
    BlockActivations shared;
    if (training)
        inputs_.emplace(arena, BlockInputsShape{.slots = options_.slots,
                                                .layers = layers(),
                                                .dtype = dtype,
                                                .rows = held,
                                                .channels = C,
                                                .on_host = options_.inputs_on_host});
    for (Slot& slot : slots_) {
        slot.blocks.resize(static_cast<size_t>(layers()));
        for (size_t l = 0; l < slot.blocks.size(); ++l) {
            BlockActivations& block = slot.blocks[l];
            block.x =
                training ? inputs_->at(static_cast<int>(&slot - slots_.data()), static_cast<int>(l))
                : l >= 2 ? slot.blocks[l - 2].x
                         : take(dtype, held, C);
            for (Activation a : block_activations(layer(static_cast<int>(l)), dtype)) {
                if (a.in_training_only && !training) continue;
                const int64_t most = most_of(a.member);
                if (a.rows && tensor_.is_split()) {
                    if (gathers_once) {
                        a.dropped = Recompute::block;
                    } else {
                        block.*a.member = residual_.gathered_norm();
                        a.member = a.rows;
                        a.rows_of = RowsOf::ranks_tokens;
                    }
                }
                const int64_t rows = a.rows_with(M, held, options_.B);
                if (training && !is_shared(a, level, apart)) {
                    block.*a.member = take(a.dtype, rows, a.width);
                    continue;
                }
                Tensor& memory = shared.*a.member;
                if (memory.rank == 0) memory = take(a.dtype, rows / a.each, most);
                block.*a.member = Tensor(memory.data, a.dtype, {rows, a.width});
            }
        }
        if (!registry_.ends_model()) continue;
        slot.out = take(dtype, held, C);
        slot.final_norm = take(dtype, held, C);
        slot.final_stats = take(DType::fp32, held, 2);
    }
}

void Stage::take_gradients(Arena& arena) {
    using Shares = PartGradient::Shares;
    const int64_t C = spec_.n_embd, M = tokens(), held = tensor_.rows_of_rank(M);
    const bool apart = options_.backward_apart;
    const DType dtype = parameters_.dtype();
    const auto take = [&](int64_t rows, int64_t cols) {
        return arena.tensor(dtype, {rows, cols}, Purpose::buffers);
    };
    const auto lasts = [&](const PartGradient& of) {
        return apart && of.read_by == ReadBy::weights;
    };
    // The widest of what all blocks share
    int64_t beside_dy = 0, wide_width = 0;
    PartGradients own;
    for (int l = 0; l < layers(); ++l)
        for (const PartGradient& of : block_gradients(layer(l))) {
            if (lasts(of) || of.shares == Shares::activation) continue;
            if (of.shares == Shares::own) {
                const auto known = std::ranges::find(own, of.member, &PartGradient::member);
                if (known == own.end())
                    own.push_back(of);
                else if (of.each * of.width > known->each * known->width)
                    *known = of;
                continue;
            }
            assert(!of.dtype || *of.dtype == dtype);
            int64_t& widest = of.shares == Shares::dy ? beside_dy : wide_width;
            widest = std::max(widest, of.each * of.width);
        }
    dres_ = take(held, C);
    const Tensor narrow =
        arena.tensor(dtype, {std::max(held * C, M * beside_dy)}, Purpose::buffers);
    dy_ = Tensor(narrow.data, dtype, {held, C});
    const Tensor wide = wide_width > 0 ? take(M, wide_width) : Tensor{},
                 rounded = take_rounded_gradient(arena);
    BlockGradients owned;
    for (const PartGradient& of : own)
        owned.*of.member =
            arena.tensor(of.dtype.value_or(dtype), {of.each * M, of.width}, Purpose::buffers);
    for (Slot& slot : slots_) {
        for (int l = 0; l < layers(); ++l) {
            const size_t i = static_cast<size_t>(l);
            BlockGradients& g = slot.gradients.emplace_back();
            g.dres = dres_, g.dy = dy_, g.rounded = rounded;
            for (const PartGradient& of : block_gradients(layer(l))) {
                const Tensor& shared = of.shares == Shares::dy     ? narrow
                                       : of.shares == Shares::wide ? wide
                                       : of.shares == Shares::own  ? owned.*of.member
                                                                   : slot.blocks[i].*of.activation;
                const int64_t rows = of.each * M;
                const DType kept = of.dtype.value_or(dtype);
                g.*of.member = lasts(of) ? arena.tensor(kept, {rows, of.width}, Purpose::buffers)
                                         : Tensor(shared.data, kept, {rows, of.width});
            }
            if (!apart) continue;
            g.dout = take(held, C), g.dmid = take(held, C);
            // Where gradients stand alone, all gradients of a block must be written together,
            // before the gradients of another micro-batch.
            if (parameters_.gradients.stand_alone())
                g.early = arena.tensor(
                    DType::fp32, {early_gradients(layer(l), registry_.blocks[i]).back().end()},
                    Purpose::buffers);
        }
        if (apart && registry_.begins_model()) slot.dembedding = take(held, C);
    }
}

/// Memory for the widest gradient that two products read in fp8; empty if there is none.
Tensor Stage::take_rounded_gradient(Arena& arena) const {
    if (!options_.fp8 || !arena.device().is_cuda() || options_.backward_apart || tensor_.is_split())
        return {};
    int64_t widest = 0;
    for (const BlockParameters& block : registry_.blocks)
        for (const int i : {block.qkv_w, block.out_w, block.up_w, block.down_w})
            if (const ProductScales* const of = options_.fp8->of(i); of && of->weight_gradient)
                widest = std::max(widest, registry_.parameters[static_cast<size_t>(i)].padded[0]);
    if (widest == 0) return {};
    const auto bytes = static_cast<int64_t>(rounded_gradient_bytes(tokens(), widest));
    return arena.tensor(DType::uint8, {bytes}, Purpose::buffers);
}

size_t Stage::scratch_bytes(const Stream& stream) const {
    // Only whether batches have doc_start matters here.
    const int32_t any = 0;
    const TokenBatch batch{.doc_start = options_.document_mask ? &any : nullptr};
    const auto attention = [&](const LayerSpec& layer) {
        const AttentionShape shape = attention_shape(layer, batch);
        return context_attention_ ? context_attention_->scratch_bytes(stream, shape)
                                  : attention_scratch_bytes(stream, shape);
    };
    return scratch_bytes_of(stream, {.spec = part_,
                                     .first = registry_.first_layer,
                                     .last = registry_.first_layer + layers(),
                                     .dtype = parameters_.dtype(),
                                     .rows = tokens(),
                                     .sequences = options_.B,
                                     .attention = attention,
                                     .vocab_rows = padded_vocabulary(),
                                     .has_embedding = registry_.begins_model(),
                                     .logits_rows = registry_.ends_model() ? logits_.shape[0] : 0});
}

}  // namespace train_gpt
