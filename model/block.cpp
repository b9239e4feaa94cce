#include "model/block.h"

#include "device/copy.h"
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
                          .epsilon = static_cast<float>(block.spec.norm_epsilon)});
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
    const auto& [spec, w, p, a, r, s] = block;
    norm1(stream, block);
    linear_forward(stream,
                   {.out = a.qkv, .x = a.norm1, .w = w.weight(p.qkv_w), .bias = w.weight(p.qkv_b)});
    if (spec.is_rotary()) rotate(stream, block);
}

void block_after_attention(Stream& stream, const Block& block, Tensor out) {
    const auto& [spec, w, p, a, r, s] = block;
    linear_forward(stream, {.out = a.x_mid,
                            .x = a.att,
                            .w = w.weight(p.out_w),
                            .bias = w.weight(p.out_b),
                            .residual = a.x});
    norm2(stream, block);
    const bool gated = spec.mlp == Mlp::swiglu;
    linear_forward(stream, {.out = gated ? a.preact : a.hidden,
                            .x = a.norm2,
                            .w = w.weight(p.up_w),
                            .bias = w.weight(p.up_b),
                            .preact = gated ? Tensor{} : a.preact});
    if (gated) hidden(stream, block);
    if (out)
        linear_forward(stream, {.out = out,
                                .x = a.hidden,
                                .w = w.weight(p.down_w),
                                .bias = w.weight(p.down_b),
                                .residual = a.x_mid});
}

void block_forward(Stream& stream, const Block& block, Tensor out) {
    const BlockActivations& a = block.activations;
    const AttentionShape& s = block.attention;
    block_before_attention(stream, block);
    const PackedHeads heads = attention_heads(block, s.T);
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
    const bool apart = part != Backward::both, gated = block.spec.mlp == Mlp::swiglu;
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
        if (!gated) hidden(stream, block);
        norm2(stream, block);
    }

    // MLP. SwiGLU's backward pass can compute its output once more.
    if (inputs && apart) copy(stream, g.dout.data, g.dres.data, g.dres.bytes());
    if (inputs && gated) {
        input_gradient(g.dhidden, g.dres, p.down_w);
        swiglu_backward(stream, {.dgate_up = g.dup,
                                 .dout = g.dhidden,
                                 .gate_up = a.preact,
                                 .out = recompute == Recompute::elementwise ? a.hidden : Tensor{}});
    } else if (inputs) {
        input_gradient(g.dup, g.dres, p.down_w, a.preact);
    }
    weight_gradient(p.down_w, p.down_b, a.hidden, apart ? g.dout : g.dres);
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
        if (recompute == Recompute::elementwise && a.rotated) rotate(stream, block);
        const PackedHeads heads = attention_heads(block, s.T), gradients(g.dqkv, block.spec, s.T);
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
        if (block.spec.is_rotary()) {
            const PackedHeads before(a.qkv, block.spec, s.T);
            rope_backward(stream, {.shape = block.rope,
                                   .dq = gradients.q,
                                   .dk = gradients.k,
                                   .q = before.q,
                                   .k = before.k,
                                   .norm = qk_norm(block),
                                   .dq_w = store.sink(p.q_norm_w),
                                   .dk_w = store.sink(p.k_norm_w)});
        }
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
