#include "model/block.h"

#include "base/error.h"
#include "kernels/gelu.h"
#include "kernels/layernorm.h"
#include "kernels/linear/linear.h"

namespace train_gpt {

BlockParameters BlockParameters::find(const ParameterStore& parameters, int layer) {
    const auto index = [&](const char* name) {
        const int i = parameters.index_of(concat("h.", layer, ".", name));
        assert(i >= 0);
        return i;
    };
    return {.ln1_w = index("ln_1.weight"),
            .ln1_b = index("ln_1.bias"),
            .qkv_w = index("attn.c_attn.weight"),
            .qkv_b = index("attn.c_attn.bias"),
            .proj_w = index("attn.c_proj.weight"),
            .proj_b = index("attn.c_proj.bias"),
            .ln2_w = index("ln_2.weight"),
            .ln2_b = index("ln_2.bias"),
            .fc_w = index("mlp.c_fc.weight"),
            .fc_b = index("mlp.c_fc.bias"),
            .fcproj_w = index("mlp.c_proj.weight"),
            .fcproj_b = index("mlp.c_proj.bias")};
}

HeadsView packed_view(Tensor qkv, int part, int T, int H, int D) {
    const int64_t C = int64_t{H} * D;
    auto* data = static_cast<char*>(qkv.data) + static_cast<size_t>(part * C) * size_of(qkv.dtype);
    return {data, T * 3 * C, 3 * C, D};
}

HeadsView plain_view(Tensor x, int T, int H, int D) {
    const int64_t C = int64_t{H} * D;
    return {x.data, T * C, C, D};
}

namespace {

void norm1(Stream& stream, const ParameterStore& w, const BlockParameters& p,
           const BlockActivations& a) {
    layernorm_forward(stream, {.out = a.ln1,
                               .stats = a.stats1,
                               .x = a.x,
                               .w = w.weight(p.ln1_w),
                               .b = w.weight(p.ln1_b)});
}

void norm2(Stream& stream, const ParameterStore& w, const BlockParameters& p,
           const BlockActivations& a) {
    layernorm_forward(stream, {.out = a.ln2,
                               .stats = a.stats2,
                               .x = a.x_mid,
                               .w = w.weight(p.ln2_w),
                               .b = w.weight(p.ln2_b)});
}

}  // namespace

void block_before_attention(Stream& stream, const ParameterStore& w, const BlockParameters& p,
                            const BlockActivations& a) {
    norm1(stream, w, p, a);
    linear_forward(stream,
                   {.out = a.qkv, .x = a.ln1, .w = w.weight(p.qkv_w), .bias = w.weight(p.qkv_b)});
}

void block_after_attention(Stream& stream, const ParameterStore& w, const BlockParameters& p,
                           const BlockActivations& a, Tensor out) {
    linear_forward(stream, {.out = a.x_mid,
                            .x = a.att,
                            .w = w.weight(p.proj_w),
                            .bias = w.weight(p.proj_b),
                            .residual = a.x});
    norm2(stream, w, p, a);
    linear_forward(stream, {.out = a.gelu,
                            .x = a.ln2,
                            .w = w.weight(p.fc_w),
                            .bias = w.weight(p.fc_b),
                            .preact = a.preact});
    if (out)
        linear_forward(stream, {.out = out,
                                .x = a.gelu,
                                .w = w.weight(p.fcproj_w),
                                .bias = w.weight(p.fcproj_b),
                                .residual = a.x_mid});
}

void block_forward(Stream& stream, const ParameterStore& w, const BlockParameters& p,
                   const BlockActivations& a, const AttentionShape& s, Tensor out) {
    block_before_attention(stream, w, p, a);
    attention_forward(stream, {.shape = s,
                               .q = packed_view(a.qkv, 0, s.T, s.H, s.D),
                               .k = packed_view(a.qkv, 1, s.T, s.H, s.D),
                               .v = packed_view(a.qkv, 2, s.T, s.H, s.D),
                               .out = plain_view(a.att, s.T, s.H, s.D),
                               .lse = a.lse.as<float>()});
    block_after_attention(stream, w, p, a, out);
}

void block_backward(Stream& stream, const ParameterStore& w, const BlockParameters& p,
                    const BlockActivations& a, const BlockGradients& g, const AttentionShape& s,
                    Recompute recompute, GradientSink bias_before) {
    const auto sink = [&](int i) { return w.sink(i); };
    const Tensor dfc = g.dwide, dqkv(g.dwide.data, g.dwide.dtype, {a.qkv.rows(), a.qkv.cols()});

    if (recompute == Recompute::block) {
        block_forward(stream, w, p, a, s, {});
    } else if (recompute == Recompute::elementwise) {
        gelu_forward(stream, a.gelu, a.preact);
        norm2(stream, w, p, a);
    }

    // MLP
    linear_backward_weight(stream, {.dw = sink(p.fcproj_w), .x = a.gelu, .dy = g.dres});
    linear_backward_input(stream,
                          {.dx = dfc, .dy = g.dres, .w = w.weight(p.fcproj_w), .preact = a.preact});
    linear_backward_weight(stream,
                           {.dw = sink(p.fc_w), .x = a.ln2, .dy = dfc, .dbias = sink(p.fc_b)});
    linear_backward_input(stream, {.dx = g.dy, .dy = dfc, .w = w.weight(p.fc_w)});
    layernorm_backward(stream, {.dres = g.dres,
                                .dw = sink(p.ln2_w),
                                .db = sink(p.ln2_b),
                                .dy = g.dy,
                                .x = a.x_mid,
                                .w = w.weight(p.ln2_w),
                                .stats = a.stats2,
                                .dbias = sink(p.proj_b)});

    // Attention
    linear_backward_weight(stream, {.dw = sink(p.proj_w), .x = a.att, .dy = g.dres});
    linear_backward_input(stream, {.dx = g.dy, .dy = g.dres, .w = w.weight(p.proj_w)});
    attention_backward(stream, {.shape = s,
                                .q = packed_view(a.qkv, 0, s.T, s.H, s.D),
                                .k = packed_view(a.qkv, 1, s.T, s.H, s.D),
                                .v = packed_view(a.qkv, 2, s.T, s.H, s.D),
                                .out = plain_view(a.att, s.T, s.H, s.D),
                                .dout = plain_view(g.dy, s.T, s.H, s.D),
                                .lse = a.lse.as<float>(),
                                .dq = packed_view(dqkv, 0, s.T, s.H, s.D),
                                .dk = packed_view(dqkv, 1, s.T, s.H, s.D),
                                .dv = packed_view(dqkv, 2, s.T, s.H, s.D)});
    if (recompute == Recompute::elementwise) norm1(stream, w, p, a);
    linear_backward_weight(stream,
                           {.dw = sink(p.qkv_w), .x = a.ln1, .dy = dqkv, .dbias = sink(p.qkv_b)});
    linear_backward_input(stream, {.dx = g.dy, .dy = dqkv, .w = w.weight(p.qkv_w)});
    layernorm_backward(stream, {.dres = g.dres,
                                .dw = sink(p.ln1_w),
                                .db = sink(p.ln1_b),
                                .dy = g.dy,
                                .x = a.x,
                                .w = w.weight(p.ln1_w),
                                .stats = a.stats1,
                                .dbias = bias_before});
}

}  // namespace train_gpt
