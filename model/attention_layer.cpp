#include "model/attention_layer.h"

#include <algorithm>
#include <cmath>

#include "kernels/linear/linear.h"

namespace train_gpt {

using Lane = TensorGroup::Lane;

RopeShape rope_shape(const LayerSpec& layer, DType dtype, int B, int T) {
    return {.dtype = dtype,
            .B = B,
            .T = T,
            .H = layer.n_head,
            .H_kv = layer.n_kv_head,
            .D = layer.head_size};
}

AttentionShape attention_shape(const LayerSpec& layer, DType dtype, int B, int T, int S) {
    return {.dtype = dtype,
            .B = B,
            .T = T,
            .S = S,
            .H = layer.n_head,
            .H_kv = layer.n_kv_head,
            .D = layer.head_size,
            .scale = 1.0f / std::sqrt(static_cast<float>(layer.head_size)),
            .softcap = static_cast<float>(layer.attention_softcap),
            .doc_start = nullptr,
            .window = layer.window};
}

HeadsView heads_view(Tensor packed, int first, int T, int D) {
    const int64_t width = packed.cols();
    auto* data = static_cast<char*>(packed.data) +
                 static_cast<size_t>(int64_t{first} * D) * size_of(packed.dtype);
    return {data, T * width, width, D};
}

Activations attention_activations(const LayerSpec& layer, DType dtype) {
    using A = BlockActivations;
    Activations list{{.member = &A::qkv, .width = layer.qkv_width(), .dtype = dtype},
                     {.member = &A::att,
                      .width = layer.attention_width(),
                      .dtype = dtype,
                      .read_by = ReadBy::weights},
                     {.member = &A::lse, .width = layer.n_head}};
    if (layer.qk_norm != QkNormKind::off)
        list.push_back({.member = &A::rotated,
                        .width = layer.attention_width() + layer.kv_width(),
                        .dtype = dtype,
                        .dropped = Recompute::elementwise,
                        .in_training_only = true});
    if (layer.qk_norm == QkNormKind::width) list.push_back({.member = &A::qk_sums, .width = 2});
    return list;
}

PartGradients attention_gradients(const LayerSpec& layer) {
    using G = BlockGradients;
    PartGradients list{
        {.member = &G::datt, .width = layer.attention_width(), .shares = PartGradient::Shares::dy},
        {.member = &G::dqkv, .width = layer.qkv_width(), .read_by = ReadBy::weights}};
    if (layer.qk_norm == QkNormKind::width)
        list.push_back({.member = &G::qk_dots,
                        .width = 2,
                        .shares = PartGradient::Shares::own,
                        .dtype = DType::fp32});
    return list;
}

namespace {

/// q, k and v in a packed tensor.
struct PackedHeads {
    HeadsView q, k, v;

    PackedHeads(Tensor qkv, const LayerSpec& layer, int T)
        : q(heads_view(qkv, 0, T, layer.head_size)),
          k(heads_view(qkv, layer.n_head, T, layer.head_size)),
          v(heads_view(qkv, layer.n_head + layer.n_kv_head, T, layer.head_size)) {}
};

/// What attention takes: q and k are rotated.
PackedHeads attention_heads(const Block& block, int T) {
    const BlockActivations& a = block.activations;
    PackedHeads heads(a.qkv, block.layer, T);
    if (a.rotated) {
        heads.q = heads_view(a.rotated, 0, T, block.layer.head_size);
        heads.k = heads_view(a.rotated, block.layer.n_head, T, block.layer.head_size);
    }
    return heads;
}

QkNorm qk_norm(const Block& block) {
    if (block.layer.qk_norm == QkNormKind::off) return {};
    return {.q_w = block.weight(block.parameters.q_norm_w),
            .k_w = block.weight(block.parameters.k_norm_w),
            .epsilon = static_cast<float>(block.layer.norm_epsilon),
            .width = {.H = block.layer.whole_n_head,
                      .H_kv = block.layer.whole_n_kv_head,
                      .sums = block.activations.qk_sums}};
}

/// again: sums of a norm over the whole width are there.
void rotate(Stream& stream, const Block& block, bool again = false) {
    const RopeShape& s = block.rope;
    const PackedHeads from(block.activations.qkv, block.layer, s.T),
        to = attention_heads(block, s.T);
    if (const Tensor sums = block.activations.qk_sums; sums && !again) {
        qk_norm_sums(stream, {.shape = s, .q = from.q, .k = from.k, .sums = sums});
        block.residual.tensor().add_up_numbers(stream, sums.as<float>(), sums.numel());
    }
    rope_forward(stream, {.shape = s,
                          .q = from.q,
                          .k = from.k,
                          .q_out = to.q,
                          .k_out = to.k,
                          .norm = qk_norm(block)});
}

/// g.dqkv from g.datt: attention, and the rotation of q and k.
void scores_backward(const BackwardPass& pass) {
    const Block& block = pass.block;
    const BlockParameters& p = block.parameters;
    const BlockActivations& a = block.activations;
    const AttentionShape& s = block.attention;
    if (pass.recomputes_elementwise() && a.rotated) rotate(pass.stream, block, true);
    const PackedHeads heads = attention_heads(block, s.T), gradients(pass.g.dqkv, block.layer, s.T);
    const AttentionBackward args{.shape = s,
                                 .q = heads.q,
                                 .k = heads.k,
                                 .v = heads.v,
                                 .out = heads_view(a.att, 0, s.T, s.D),
                                 .dout = heads_view(pass.g.datt, 0, s.T, s.D),
                                 .lse = a.lse.as<float>(),
                                 .dq = gradients.q,
                                 .dk = gradients.k,
                                 .dv = gradients.v,
                                 .sinks = block.weight(p.sinks),
                                 .dsinks = pass.early_sink(p.sinks)};
    if (block.context)
        block.context->backward(pass.stream, args, pass.recompute == Recompute::block);
    else
        attention_backward(pass.stream, args);
    if (!block.layer.is_rotary) return;
    const PackedHeads before(a.qkv, block.layer, s.T);
    QkNorm norm = qk_norm(block);
    if (const Tensor dots = pass.g.qk_dots) {
        qk_norm_dots(pass.stream, {.shape = block.rope,
                                   .dq = gradients.q,
                                   .dk = gradients.k,
                                   .q = before.q,
                                   .k = before.k,
                                   .q_w = norm.q_w,
                                   .k_w = norm.k_w,
                                   .dots = dots});
        block.residual.tensor().add_up_numbers(pass.stream, dots.as<float>(), dots.numel());
        norm.width.dots = dots;
    }
    rope_backward(pass.stream, {.shape = block.rope,
                                .dq = gradients.q,
                                .dk = gradients.k,
                                .q = before.q,
                                .k = before.k,
                                .norm = norm,
                                .dq_w = pass.early_sink(p.q_norm_w),
                                .dk_w = pass.early_sink(p.k_norm_w)});
}

}  // namespace

void attend_within_batch(Stream& stream, const Block& block) {
    const BlockActivations& a = block.activations;
    const AttentionShape& s = block.attention;
    const PackedHeads heads = attention_heads(block, s.T);
    const AttentionForward args{.shape = s,
                                .q = heads.q,
                                .k = heads.k,
                                .v = heads.v,
                                .out = heads_view(a.att, 0, s.T, s.D),
                                .lse = a.lse.as<float>(),
                                .sinks = block.weight(block.parameters.sinks)};
    if (block.context)
        block.context->forward(stream, args);
    else
        attention_forward(stream, args);
}

void attention_layer_forward(Stream& stream, const Block& block, const Attend& attend) {
    const BlockParameters& p = block.parameters;
    const BlockActivations& a = block.activations;
    block.residual.for_each_chunk(stream, Lane::inputs, a.qkv.rows(), [&](Range rows) {
        linear_forward(stream, {.out = rows_of(a.qkv, rows),
                                .x = rows_of(a.norm1, rows),
                                .w = block.operand(p.qkv_w),
                                .bias = block.weight(p.qkv_b),
                                .rounded_x = block.rounded_norm1().matrix()});
    });
    if (block.layer.is_rotary) rotate(stream, block);
    attend(stream, block);
}

Addends add_attention(Stream& stream, const Block& block) {
    const BlockActivations& a = block.activations;
    return block.residual.add(stream, {.out = a.x_mid,
                                       .x = a.att,
                                       .residual = a.x,
                                       .w = block.operand(block.parameters.out_w),
                                       .bias = block.weight(block.parameters.out_b)});
}

void attention_layer_backward(const BackwardPass& pass) {
    const BlockParameters& p = pass.block.parameters;
    const BlockActivations& a = pass.block.activations;
    const BlockGradients& g = pass.g;
    const Tensor dmid = pass.gather_dres(g.dmid);
    pass.restore(pass.block.norm1());
    const Fp8Matrix of_dmid = pass.rounded_gradient(dmid, p.out_w);
    if (pass.inputs) pass.input_gradient(g.datt, dmid, p.out_w, {}, of_dmid);
    pass.weight_gradient(p.out_w, -1, a.att, dmid, {}, of_dmid);
    if (pass.inputs) scores_backward(pass);
    const Fp8Matrix of_dqkv = pass.rounded_gradient(g.dqkv, p.qkv_w);
    if (pass.inputs) pass.norm_output_gradient(g.dqkv, p.qkv_w, of_dqkv);
    pass.weight_gradient_of_norm(p.qkv_w, p.qkv_b, a.norm1, g.dqkv,
                                 pass.block.rounded_norm1().matrix(), of_dqkv);
}

size_t attention_layer_scratch_bytes(const Stream& stream, const LayerSpec& layer, DType dtype,
                                     int64_t rows) {
    const int64_t C = layer.n_embd;
    const size_t products =
        std::max(linear_scratch_bytes(stream, dtype, rows, layer.qkv_width(), C),
                 linear_scratch_bytes(stream, dtype, rows, C, layer.attention_width()));
    if (layer.qk_norm == QkNormKind::off) return products;
    return std::max(products,
                    rope_scratch_bytes(stream, rope_shape(layer, dtype, 1, static_cast<int>(rows)),
                                       layer.qk_norm == QkNormKind::width));
}

}  // namespace train_gpt
