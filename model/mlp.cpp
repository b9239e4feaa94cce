#include "model/mlp.h"

#include <algorithm>

#include "kernels/gelu.h"
#include "kernels/linear/linear.h"
#include "kernels/relu_squared.h"
#include "kernels/swiglu.h"

namespace train_gpt {

using Lane = TensorGroup::Lane;

Activations mlp_activations(const LayerSpec& layer, DType dtype) {
    using A = BlockActivations;
    return {{.member = &A::preact, .width = layer.up_width(), .dtype = dtype},
            {.member = &A::hidden,
             .width = layer.n_ff,
             .dtype = dtype,
             .dropped = Recompute::elementwise,
             .read_by = ReadBy::weights}};
}

PartGradients mlp_gradients(const LayerSpec& layer) {
    using G = BlockGradients;
    PartGradient dup{.member = &G::dup, .width = layer.up_width(), .read_by = ReadBy::weights};
    if (!layer.is_gated()) return {dup};
    dup.shares = PartGradient::Shares::activation, dup.activation = &BlockActivations::preact;
    return {{.member = &G::dhidden, .width = layer.n_ff}, dup};
}

void mlp_forward(Stream& stream, const Block& block) {
    const BlockParameters& p = block.parameters;
    const BlockActivations& a = block.activations;
    const Mlp mlp = block.layer.mlp;
    const Fp8Output rounded = block.rounded_hidden();
    const bool fused = mlp == Mlp::gelu && !rounded;
    block.residual.for_each_chunk(stream, Lane::inputs, a.preact.rows(), [&](Range rows) {
        linear_forward(stream, {.out = rows_of(fused ? a.hidden : a.preact, rows),
                                .x = rows_of(a.norm2, rows),
                                .w = block.operand(p.up_w),
                                .bias = block.weight(p.up_b),
                                .preact = fused ? rows_of(a.preact, rows) : Tensor{},
                                .rounded_x = block.rounded_norm2().matrix(),
                                .gelu_of_preact = block.will_round_hidden()});
    });
    if (mlp == Mlp::gelu && rounded) gelu_forward_rounded(stream, rounded, a.preact);
    if (mlp == Mlp::swiglu)
        swiglu_forward(stream, {.out = a.hidden,
                                .gate_up = a.preact,
                                .clamped = block.layer.clamped,
                                .rounded = rounded});
    if (mlp == Mlp::relu2)
        relu_squared_forward(stream, {.out = a.hidden, .x = a.preact, .rounded = rounded});
}

Addends add_mlp(Stream& stream, const Block& block, Tensor out) {
    const BlockActivations& a = block.activations;
    return block.residual.add(stream, {.out = out,
                                       .x = a.hidden,
                                       .residual = a.x_mid,
                                       .w = block.operand(block.parameters.down_w),
                                       .bias = block.weight(block.parameters.down_b),
                                       .rounded_x = block.rounded_hidden().matrix(),
                                       .keeps_bias = true});
}

void mlp_backward(const BackwardPass& pass) {
    const BlockParameters& p = pass.block.parameters;
    const BlockActivations& a = pass.block.activations;
    const BlockGradients& g = pass.g;
    const Tensor dout = pass.gather_dres(g.dout);
    pass.restore(pass.block.norm2());
    const Mlp mlp = pass.block.layer.mlp;
    const Fp8Matrix of_dout = pass.rounded_gradient(dout, p.down_w);
    // The backward passes of SwiGLU and ReLU² can compute their output once more.
    const Tensor again = pass.recomputes_elementwise() ? a.hidden : Tensor{};
    if (pass.inputs && mlp == Mlp::swiglu) {
        pass.input_gradient(g.dhidden, dout, p.down_w, {}, of_dout);
        swiglu_backward(pass.stream, {.dgate_up = g.dup,
                                      .dout = g.dhidden,
                                      .gate_up = a.preact,
                                      .out = again,
                                      .clamped = pass.block.layer.clamped});
    } else if (pass.inputs && mlp == Mlp::relu2) {
        pass.input_gradient(g.dup, dout, p.down_w, {}, of_dout);
        relu_squared_backward(pass.stream,
                              {.dx = g.dup, .dout = g.dup, .x = a.preact, .out = again});
    } else if (pass.inputs) {
        if (pass.recomputes_elementwise()) gelu_forward(pass.stream, a.hidden, a.preact);
        pass.input_gradient(g.dup, dout, p.down_w, a.preact, of_dout);
    }
    // What is computed once more has values.
    const Fp8Output rounded =
        pass.recomputes_elementwise() ? Fp8Output{} : pass.block.rounded_hidden();
    pass.weight_gradient(p.down_w, p.down_b, a.hidden, dout, rounded.matrix(), of_dout);
    const Fp8Matrix of_dup = pass.rounded_gradient(g.dup, p.up_w);
    if (pass.inputs) pass.norm_output_gradient(g.dup, p.up_w, of_dup);
    pass.weight_gradient_of_norm(p.up_w, p.up_b, a.norm2, g.dup,
                                 pass.block.rounded_norm2().matrix(), of_dup);
}

size_t mlp_scratch_bytes(const Stream& stream, const LayerSpec& layer, DType dtype, int64_t rows) {
    const int64_t C = layer.n_embd;
    return std::max(linear_scratch_bytes(stream, dtype, rows, layer.up_width(), C),
                    linear_scratch_bytes(stream, dtype, rows, C, layer.n_ff));
}

}  // namespace train_gpt
