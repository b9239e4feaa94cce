#include "model/block.h"

#include "device/copy.h"
#include "kernels/gelu.h"
#include "kernels/linear/linear.h"
#include "kernels/norm.h"

namespace train_gpt {

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

    PackedHeads(Tensor qkv, const AttentionShape& s)
        : q(heads_view(qkv, 0, s.T, s.D)),
          k(heads_view(qkv, s.H, s.T, s.D)),
          v(heads_view(qkv, s.H + s.H_kv, s.T, s.D)) {}
};

/// What a norm reads and writes; w and b are indices of parameters.
struct NormOf {
    Tensor out, stats, x;
    int w, b;
};

void norm(Stream& stream, const Block& block, const NormOf& of) {
    norm_forward(stream, {.norm = block.spec.norm,
                          .out = of.out,
                          .stats = of.stats,
                          .x = of.x,
                          .w = block.weights.weight(of.w),
                          .b = block.weights.weight(of.b),
                          .epsilon = block.spec.norm_epsilon});
}

void norm1(Stream& stream, const Block& block) {
    const BlockActivations& a = block.activations;
    norm(stream, block,
         {a.norm1, a.stats1, a.x, block.parameters.norm1_w, block.parameters.norm1_b});
}

void norm2(Stream& stream, const Block& block) {
    const BlockActivations& a = block.activations;
    norm(stream, block,
         {a.norm2, a.stats2, a.x_mid, block.parameters.norm2_w, block.parameters.norm2_b});
}

}  // namespace

void block_before_attention(Stream& stream, const Block& block) {
    const auto& [spec, w, p, a, s] = block;
    norm1(stream, block);
    linear_forward(stream,
                   {.out = a.qkv, .x = a.norm1, .w = w.weight(p.qkv_w), .bias = w.weight(p.qkv_b)});
}

void block_after_attention(Stream& stream, const Block& block, Tensor out) {
    const auto& [spec, w, p, a, s] = block;
    linear_forward(stream, {.out = a.x_mid,
                            .x = a.att,
                            .w = w.weight(p.out_w),
                            .bias = w.weight(p.out_b),
                            .residual = a.x});
    norm2(stream, block);
    linear_forward(stream, {.out = a.gelu,
                            .x = a.norm2,
                            .w = w.weight(p.up_w),
                            .bias = w.weight(p.up_b),
                            .preact = a.preact});
    if (out)
        linear_forward(stream, {.out = out,
                                .x = a.gelu,
                                .w = w.weight(p.down_w),
                                .bias = w.weight(p.down_b),
                                .residual = a.x_mid});
}

void block_forward(Stream& stream, const Block& block, Tensor out) {
    const BlockActivations& a = block.activations;
    const AttentionShape& s = block.attention;
    block_before_attention(stream, block);
    const PackedHeads heads(a.qkv, s);
    attention_forward(stream, {.shape = s,
                               .q = heads.q,
                               .k = heads.k,
                               .v = heads.v,
                               .out = heads_view(a.att, 0, s.T, s.D),
                               .lse = a.lse.as<float>()});
    block_after_attention(stream, block, out);
}

void block_backward(Stream& stream, ParameterCollectives& store, const Block& block,
                    const BlockGradients& g, Recompute recompute, Backward part) {
    const UnitLease& w = block.weights;
    const BlockParameters& p = block.parameters;
    const BlockActivations& a = block.activations;
    const AttentionShape& s = block.attention;
    const bool inputs = part != Backward::weights, weights = part != Backward::inputs;
    const bool apart = part != Backward::both;
    const auto weight_gradient = [&](int weight, int bias, Tensor x, Tensor dy) {
        if (weights)
            linear_backward_weight(
                stream, {.dw = store.sink(weight), .x = x, .dy = dy, .dbias = store.sink(bias)});
    };
    const auto input_gradient = [&](Tensor dx, Tensor dy, int weight, Tensor preact = {}) {
        linear_backward_input(stream,
                              {.dx = dx, .dy = dy, .w = w.weight(weight), .preact = preact});
    };

    if (inputs && recompute == Recompute::block) {
        block_forward(stream, block, {});
    } else if (inputs && recompute == Recompute::elementwise) {
        gelu_forward(stream, a.gelu, a.preact);
        norm2(stream, block);
    }

    // MLP
    if (inputs && apart) copy(stream, g.dout.data, g.dres.data, g.dres.bytes());
    weight_gradient(p.down_w, p.down_b, a.gelu, apart ? g.dout : g.dres);
    if (inputs) input_gradient(g.dup, g.dres, p.down_w, a.preact);
    weight_gradient(p.up_w, p.up_b, a.norm2, g.dup);
    if (inputs) {
        input_gradient(g.dy, g.dup, p.up_w);
        norm_backward(stream, {.norm = block.spec.norm,
                               .dres = g.dres,
                               .dw = store.sink(p.norm2_w),
                               .db = store.sink(p.norm2_b),
                               .dy = g.dy,
                               .x = a.x_mid,
                               .w = w.weight(p.norm2_w),
                               .stats = a.stats2,
                               .dbias = store.sink(p.out_b)});
        if (apart) copy(stream, g.dmid.data, g.dres.data, g.dres.bytes());
    }

    // Attention
    weight_gradient(p.out_w, -1, a.att, apart ? g.dmid : g.dres);
    if (inputs) {
        input_gradient(g.datt, g.dres, p.out_w);
        const PackedHeads heads(a.qkv, s), gradients(g.dqkv, s);
        attention_backward(stream, {.shape = s,
                                    .q = heads.q,
                                    .k = heads.k,
                                    .v = heads.v,
                                    .out = heads_view(a.att, 0, s.T, s.D),
                                    .dout = heads_view(g.datt, 0, s.T, s.D),
                                    .lse = a.lse.as<float>(),
                                    .dq = gradients.q,
                                    .dk = gradients.k,
                                    .dv = gradients.v});
        if (recompute == Recompute::elementwise) norm1(stream, block);
    }
    weight_gradient(p.qkv_w, p.qkv_b, a.norm1, g.dqkv);
    if (!inputs) return;
    input_gradient(g.dy, g.dqkv, p.qkv_w);
    norm_backward(stream, {.norm = block.spec.norm,
                           .dres = g.dres,
                           .dw = store.sink(p.norm1_w),
                           .db = store.sink(p.norm1_b),
                           .dy = g.dy,
                           .x = a.x,
                           .w = w.weight(p.norm1_w),
                           .stats = a.stats1});
}

}  // namespace train_gpt
