#include "model/block.h"

#include "device/copy.h"
#include "kernels/convert.h"
#include "kernels/gelu.h"
#include "kernels/linear/linear.h"
#include "kernels/norm.h"
#include "kernels/swiglu.h"

namespace train_gpt {

RopeShape rope_shape(const DecoderSpec& spec, DType dtype, int B, int T) {
    return {.dtype = dtype,
            .B = B,
            .T = T,
            .H = spec.n_head,
            .H_kv = spec.n_kv_head,
            .D = spec.head_size};
}

HeadsView heads_view(Tensor packed, int first, int T, int D) {
    const int64_t width = packed.cols();
    auto* data = static_cast<char*>(packed.data) +
                 static_cast<size_t>(int64_t{first} * D) * size_of(packed.dtype);
    return {data, T * width, width, D};
}

namespace {

/// q, k and v in a packed tensor.
struct PackedHeads {
    HeadsView q, k, v;

    PackedHeads(Tensor qkv, const DecoderSpec& spec, int T)
        : q(heads_view(qkv, 0, T, spec.head_size)),
          k(heads_view(qkv, spec.n_head, T, spec.head_size)),
          v(heads_view(qkv, spec.n_head + spec.n_kv_head, T, spec.head_size)) {}
};

/// What attention takes: q and k are rotated.
PackedHeads attention_heads(const Block& block, int T) {
    const BlockActivations& a = block.activations;
    PackedHeads heads(a.qkv, block.spec, T);
    if (a.rotated) {
        heads.q = heads_view(a.rotated, 0, T, block.spec.head_size);
        heads.k = heads_view(a.rotated, block.spec.n_head, T, block.spec.head_size);
    }
    return heads;
}

QkNorm qk_norm(const Block& block) {
    if (!block.spec.qk_norm) return {};
    return {.q_w = block.weights.weight(block.parameters.q_norm_w),
            .k_w = block.weights.weight(block.parameters.k_norm_w),
            .epsilon = static_cast<float>(block.spec.norm_epsilon)};
}

void rotate(Stream& stream, const Block& block) {
    const RopeShape& s = block.rope;
    const PackedHeads from(block.activations.qkv, block.spec, s.T),
        to = attention_heads(block, s.T);
    rope_forward(stream, {.shape = s,
                          .q = from.q,
                          .k = from.k,
                          .q_out = to.q,
                          .k_out = to.k,
                          .norm = qk_norm(block)});
}

/// The MLP's hidden layer from preact.
void hidden(Stream& stream, const Block& block) {
    const BlockActivations& a = block.activations;
    if (block.spec.mlp == Mlp::swiglu)
        swiglu_forward(stream, {.out = a.hidden, .gate_up = a.preact});
    else
        gelu_forward(stream, a.hidden, a.preact);
}

/// One of a block's norms. w and b are indices of parameters.
struct NormOf {
    Tensor out, out_rows, stats, x;
    int w, b;
};

NormOf norm1_of(const Block& block) {
    const BlockActivations& a = block.activations;
    return {
        a.norm1, a.norm1_rows, a.stats1, a.x, block.parameters.norm1_w, block.parameters.norm1_b};
}

NormOf norm2_of(const Block& block) {
    const BlockActivations& a = block.activations;
    return {a.norm2,
            a.norm2_rows,
            a.stats2,
            a.x_mid,
            block.parameters.norm2_w,
            block.parameters.norm2_b};
}

/// The rank's rows of a norm; if x is a sum, after computing x. gathers: all rows follow.
void norm(Stream& stream, const Block& block, const NormOf& of, const Addends& addends = {},
          bool gathers = true) {
    for (int chunk = 0; chunk < block.tensor.chunks(); ++chunk) {
        const TensorGroup::Rows rows = block.tensor.rows(of.out.rows(), chunk);
        const auto held = [&](const Tensor& t) {
            return t ? t.row_range(rows.held.first, rows.held.n) : Tensor{};
        };
        if (addends.sum) block.tensor.wait(stream, TensorGroup::Lane::sums, chunk);
        norm_forward(stream, {.norm = block.spec.norm,
                              .out = of.out_rows ? held(of.out_rows)
                                                 : of.out.row_range(rows.strip.first, rows.strip.n),
                              .stats = held(of.stats),
                              .x = held(addends.sum ? addends.sum : of.x),
                              .w = block.weights.weight(of.w),
                              .b = block.weights.weight(of.b),
                              .residual = held(addends.residual),
                              .bias = addends.bias,
                              .x_out = addends.sum ? held(of.x) : Tensor{},
                              .epsilon = static_cast<float>(block.spec.norm_epsilon)});
        if (gathers)
            block.tensor.gather(stream, TensorGroup::Lane::inputs, of.out, of.out_rows, chunk);
    }
}

/// Calls product(rows) for all M rows, chunk by chunk as they arrive in a lane.
template <class Product>
void for_each_chunk(Stream& stream, TensorGroup& tensor, TensorGroup::Lane lane, int64_t M,
                    const Product& product) {
    for (int chunk = 0; chunk < tensor.chunks(); ++chunk) {
        tensor.wait(stream, lane, chunk);
        product(tensor.rows(M, chunk).chunk);
    }
}

/// The same for products whose sum over the ranks is wanted: a chunk's sum travels while the next
/// chunk is computed.
template <class Product>
void for_each_chunk_of_sum(Stream& stream, TensorGroup& tensor, Tensor sum, Tensor products,
                           const Product& product) {
    for (int chunk = 0; chunk < tensor.chunks(); ++chunk) {
        const Range rows = tensor.rows(products.rows(), chunk).chunk;
        product(products.row_range(rows.first, rows.n), rows);
        tensor.add_up(stream, sum, products, chunk);
    }
}

Tensor rows_of(const Tensor& t, const Range& rows) {
    return t ? t.row_range(rows.first, rows.n) : Tensor{};
}

/// out and down: products into the residual stream. Without other ranks, with residual and bias.
struct IntoResidual {
    Tensor out, x, residual;
    int w, b;
};

void into_residual(Stream& stream, const Block& block, const IntoResidual& of) {
    const UnitLease& w = block.weights;
    if (!block.tensor.is_split()) {
        linear_forward(stream, {.out = of.out,
                                .x = of.x,
                                .w = w.weight(of.w),
                                .bias = w.weight(of.b),
                                .residual = of.residual});
        return;
    }
    for_each_chunk_of_sum(
        stream, block.tensor, of.out, block.activations.products, [&](Tensor part, Range rows) {
            linear_forward(stream, {.out = part, .x = rows_of(of.x, rows), .w = w.weight(of.w)});
        });
}

}  // namespace

void block_before_attention(Stream& stream, const Block& block) {
    const UnitLease& w = block.weights;
    const BlockParameters& p = block.parameters;
    const BlockActivations& a = block.activations;
    norm(stream, block, norm1_of(block), block.input);
    for_each_chunk(stream, block.tensor, TensorGroup::Lane::inputs, a.qkv.rows(), [&](Range rows) {
        linear_forward(stream, {.out = rows_of(a.qkv, rows),
                                .x = rows_of(a.norm1, rows),
                                .w = w.weight(p.qkv_w),
                                .bias = w.weight(p.qkv_b)});
    });
    if (block.spec.is_rotary()) rotate(stream, block);
}

void block_after_attention(Stream& stream, const Block& block, Tensor out) {
    const UnitLease& w = block.weights;
    const BlockParameters& p = block.parameters;
    const BlockActivations& a = block.activations;
    const bool split = block.tensor.is_split();
    into_residual(stream, block, {split ? a.added_up : a.x_mid, a.att, a.x, p.out_w, p.out_b});
    norm(stream, block, norm2_of(block),
         split ? Addends{a.added_up, a.x, w.weight(p.out_b)} : Addends{});
    const bool gated = block.spec.mlp == Mlp::swiglu;
    for_each_chunk(
        stream, block.tensor, TensorGroup::Lane::inputs, a.preact.rows(), [&](Range rows) {
            linear_forward(stream, {.out = rows_of(gated ? a.preact : a.hidden, rows),
                                    .x = rows_of(a.norm2, rows),
                                    .w = w.weight(p.up_w),
                                    .bias = w.weight(p.up_b),
                                    .preact = gated ? Tensor{} : rows_of(a.preact, rows)});
        });
    if (gated) hidden(stream, block);
    if (out) into_residual(stream, block, {out, a.hidden, a.x_mid, p.down_w, p.down_b});
}

void block_forward(Stream& stream, const Block& block, Tensor out) {
    const BlockActivations& a = block.activations;
    const AttentionShape& s = block.attention;
    block_before_attention(stream, block);
    const PackedHeads heads = attention_heads(block, s.T);
    const AttentionForward args{.shape = s,
                                .q = heads.q,
                                .k = heads.k,
                                .v = heads.v,
                                .out = heads_view(a.att, 0, s.T, s.D),
                                .lse = a.lse.as<float>()};
    if (block.context)
        block.context->forward(stream, args);
    else
        attention_forward(stream, args);
    block_after_attention(stream, block, out);
}

std::vector<EarlyGradient> early_gradients(const DecoderSpec& spec, const BlockParameters& p) {
    constexpr int64_t alignment = 64;  // of kernels' outputs, in elements
    std::vector<EarlyGradient> all;
    const auto add = [&](int parameter, int64_t numel) {
        if (parameter < 0) return;
        const int64_t end = all.empty() ? 0 : all.back().end();
        all.push_back({parameter, (end + alignment - 1) / alignment * alignment, numel});
    };
    for (const int i : {p.norm1_w, p.norm1_b, p.out_b, p.norm2_w, p.norm2_b}) add(i, spec.n_embd);
    for (const int i : {p.q_norm_w, p.k_norm_w}) add(i, spec.head_size);
    return all;
}

namespace {

/// The backward pass of one block. Its methods are the steps of block_backward().
class BlockBackward {
  public:
    BlockBackward(Stream& stream, Gradients& gradients, const Block& block, const BlockGradients& g,
                  Recompute recompute, Backward part)
        : stream_(stream),
          gradients_(gradients),
          block_(block),
          tensor_(block.tensor),
          g_(g),
          recompute_(recompute),
          inputs_(part != Backward::weights),
          weights_(part != Backward::inputs),
          apart_(part != Backward::both),
          early_(g.early ? early_gradients(block.spec, block.parameters)
                         : std::vector<EarlyGradient>()) {}

    void mlp() {
        const BlockParameters& p = block_.parameters;
        const BlockActivations& a = block_.activations;
        if (inputs_ && apart_) copy(stream_, g_.dout.data, g_.dres.data, g_.dres.bytes());
        const Tensor dout = gathered(g_.dout);
        restore(norm2_of(block_));
        // SwiGLU's backward pass can compute its output once more.
        if (inputs_ && block_.spec.mlp == Mlp::swiglu) {
            input_gradient(g_.dhidden, dout, p.down_w);
            swiglu_backward(stream_, {.dgate_up = g_.dup,
                                      .dout = g_.dhidden,
                                      .gate_up = a.preact,
                                      .out = recomputes_elementwise() ? a.hidden : Tensor{}});
        } else if (inputs_) {
            if (recomputes_elementwise()) hidden(stream_, block_);
            input_gradient(g_.dup, dout, p.down_w, a.preact);
        }
        if (weights_) {
            tensor_.wait(stream_, TensorGroup::Lane::gradients);
            weight_gradient(p.down_w, p.down_b, a.hidden, dout);
        }
        if (inputs_) summed_input_gradient(g_.dup, p.up_w);
        weight_gradient_of_gathered(p.up_w, p.up_b, a.norm2, g_.dup);
        if (!inputs_) return;
        norm_gradients(norm2_of(block_), p.out_b);
        if (apart_) copy(stream_, g_.dmid.data, g_.dres.data, g_.dres.bytes());
    }

    void attention() {
        const BlockParameters& p = block_.parameters;
        const BlockActivations& a = block_.activations;
        const Tensor dmid = gathered(g_.dmid);
        restore(norm1_of(block_));
        if (inputs_) input_gradient(g_.datt, dmid, p.out_w);
        if (weights_) {
            tensor_.wait(stream_, TensorGroup::Lane::gradients);
            weight_gradient(p.out_w, -1, a.att, dmid);
        }
        if (inputs_) {
            scores();
            summed_input_gradient(g_.dqkv, p.qkv_w);
        }
        weight_gradient_of_gathered(p.qkv_w, p.qkv_b, a.norm1, g_.dqkv);
        if (inputs_) norm_gradients(norm1_of(block_), -1);
    }

    /// In the second half: what the first one kept.
    void add_early_gradients() {
        if (inputs_) return;
        for (const EarlyGradient& kept : early_) {
            const GradientSink to = gradients_.sink(stream_, kept.parameter);
            widen(stream_, static_cast<float*>(to.data), g_.early.as<float>() + kept.offset,
                  DType::fp32, kept.numel, to.accumulate);
        }
    }

  private:
    bool recomputes_elementwise() const { return recompute_ == Recompute::elementwise; }

    /// The residual stream's gradient for products, of all rows; `copy` has it for the second half.
    Tensor gathered(Tensor copy) {
        const Tensor held = inputs_ ? g_.dres : copy;
        if (!tensor_.is_split()) return held;
        for (int chunk = 0; chunk < tensor_.chunks(); ++chunk)
            tensor_.gather(stream_, TensorGroup::Lane::gradients, products(), held, chunk);
        return products();
    }

    /// A norm's output of all rows for weight gradients, unless it was kept.
    void restore(const NormOf& of) {
        const bool kept = tensor_.options().keep_gathered;
        if (inputs_ && recomputes_elementwise() && !kept)
            norm(stream_, block_, of, {}, weights_);
        else if (weights_ && of.out_rows)
            for (int chunk = 0; chunk < tensor_.chunks(); ++chunk)
                tensor_.gather(stream_, TensorGroup::Lane::inputs, of.out, of.out_rows, chunk);
    }

    /// dx from dy of all rows, of a product into the residual stream.
    void input_gradient(Tensor dx, Tensor dy, int weight, Tensor preact = {}) {
        for_each_chunk(stream_, tensor_, TensorGroup::Lane::gradients, dy.rows(), [&](Range rows) {
            linear_backward_input(stream_, {.dx = rows_of(dx, rows),
                                            .dy = rows_of(dy, rows),
                                            .w = block_.weights.weight(weight),
                                            .preact = rows_of(preact, rows)});
        });
    }

    /// g.dy from dy, of a product that reads a norm's output.
    void summed_input_gradient(Tensor dy, int weight) {
        const Tensor w = block_.weights.weight(weight);
        if (!tensor_.is_split())
            return linear_backward_input(stream_, {.dx = g_.dy, .dy = dy, .w = w});
        for_each_chunk_of_sum(stream_, tensor_, g_.dy, products(), [&](Tensor part, Range rows) {
            linear_backward_input(stream_, {.dx = part, .dy = rows_of(dy, rows), .w = w});
        });
    }

    void weight_gradient(int weight, int bias, Tensor x, Tensor dy) {
        linear_backward_weight(stream_, {.dw = gradients_.sink(stream_, weight),
                                         .x = x,
                                         .dy = dy,
                                         .dbias = gradients_.sink(stream_, bias)});
    }

    /// Of a product that reads a norm's output. It runs while its input's gradients are added up.
    void weight_gradient_of_gathered(int weight, int bias, Tensor x, Tensor dy) {
        if (!weights_) return;
        tensor_.wait(stream_, TensorGroup::Lane::inputs);
        weight_gradient(weight, bias, x, dy);
    }

    /// bias: of the product whose output the norm's x has been added to.
    void norm_gradients(const NormOf& of, int bias) {
        tensor_.wait(stream_, TensorGroup::Lane::sums);
        norm_backward(stream_, {.norm = block_.spec.norm,
                                .dres = g_.dres,
                                .dw = early_sink(of.w),
                                .db = early_sink(of.b),
                                .dy = g_.dy,
                                .x = of.x,
                                .w = block_.weights.weight(of.w),
                                .stats = of.stats,
                                .dbias = early_sink(bias)});
    }

    /// g.dqkv from g.datt: attention, and the rotation of q and k.
    void scores() {
        const BlockParameters& p = block_.parameters;
        const BlockActivations& a = block_.activations;
        const AttentionShape& s = block_.attention;
        if (recomputes_elementwise() && a.rotated) rotate(stream_, block_);
        const PackedHeads heads = attention_heads(block_, s.T),
                          gradients(g_.dqkv, block_.spec, s.T);
        const AttentionBackward args{.shape = s,
                                     .q = heads.q,
                                     .k = heads.k,
                                     .v = heads.v,
                                     .out = heads_view(a.att, 0, s.T, s.D),
                                     .dout = heads_view(g_.datt, 0, s.T, s.D),
                                     .lse = a.lse.as<float>(),
                                     .dq = gradients.q,
                                     .dk = gradients.k,
                                     .dv = gradients.v};
        if (block_.context)
            block_.context->backward(stream_, args, recompute_ == Recompute::block);
        else
            attention_backward(stream_, args);
        if (!block_.spec.is_rotary()) return;
        const PackedHeads before(a.qkv, block_.spec, s.T);
        rope_backward(stream_, {.shape = block_.rope,
                                .dq = gradients.q,
                                .dk = gradients.k,
                                .q = before.q,
                                .k = before.k,
                                .norm = qk_norm(block_),
                                .dq_w = early_sink(p.q_norm_w),
                                .dk_w = early_sink(p.k_norm_w)});
    }

    /// Where a gradient goes that comes with those of inputs.
    GradientSink early_sink(int i) {
        for (const EarlyGradient& kept : early_)
            if (kept.parameter == i)
                return {g_.early.as<float>() + kept.offset, DType::fp32, false};
        return gradients_.sink(stream_, i);
    }

    Tensor products() const { return block_.activations.products; }

    Stream& stream_;
    Gradients& gradients_;
    const Block& block_;
    TensorGroup& tensor_;
    const BlockGradients& g_;
    Recompute recompute_;
    bool inputs_, weights_, apart_;
    std::vector<EarlyGradient> early_;  // those that are kept
};

}  // namespace

void block_backward(Stream& stream, Gradients& gradients, const Block& block,
                    const BlockGradients& g, Recompute recompute, Backward part) {
    if (part != Backward::weights && recompute == Recompute::block)
        block_forward(stream, block, {});
    BlockBackward backward(stream, gradients, block, g, recompute, part);
    backward.mlp();
    backward.attention();
    backward.add_early_gradients();
}

}  // namespace train_gpt
