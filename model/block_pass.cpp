#include "model/block_pass.h"

#include <cassert>
#include <cstddef>

#include "device/copy.h"
#include "kernels/convert.h"
#include "kernels/linear/linear.h"

namespace train_gpt {

using Lane = TensorGroup::Lane;

StreamNorm Block::norm1() const {
    const BlockActivations& a = activations;
    return {.out = a.norm1,
            .stats = a.stats1,
            .x = a.x,
            .w = weight_if_leased(parameters.norm1_w),
            .b = weight_if_leased(parameters.norm1_b),
            .out_rows = a.norm1_rows,
            .rounded = rounded_norm1()};
}

StreamNorm Block::norm2() const {
    const BlockActivations& a = activations;
    return {.out = a.norm2,
            .stats = a.stats2,
            .x = a.x_mid,
            .w = weight_if_leased(parameters.norm2_w),
            .b = weight_if_leased(parameters.norm2_b),
            .out_rows = a.norm2_rows,
            .rounded = rounded_norm2()};
}

Fp8Output Block::rounded_input(int weight, Tensor values) const {
    const ProductScales* const of = scales(weight);
    if (!of || !of->x.is_set || !of->weight_gradient) return {};
    // One byte for each of both; values have two or more.
    auto* const codes = static_cast<std::byte*>(values.data);
    return {
        .codes = Tensor(codes, DType::uint8, {values.rows(), values.cols()}),
        .transposed = Tensor(codes + values.numel(), DType::uint8, {values.cols(), values.rows()}),
        .scaling = of->x};
}

Fp8Output Block::rounded_norm1() const {
    return rounds_norms ? rounded_input(parameters.qkv_w, activations.norm1) : Fp8Output{};
}

Fp8Output Block::rounded_norm2() const {
    // A router reads values.
    return rounds_norms && !layer.experts ? rounded_input(parameters.up_w, activations.norm2)
                                          : Fp8Output{};
}

Fp8Output Block::rounded_hidden() const {
    return rounds_hidden && !layer.experts ? rounded_input(parameters.down_w, activations.hidden)
                                           : Fp8Output{};
}

bool Block::will_round_hidden() const {
    const ProductScales* const down = scales(parameters.down_w);
    return rounds_hidden && !layer.experts && down && down->x.scale && down->weight_gradient;
}

std::vector<EarlyGradient> early_gradients(const LayerSpec& layer, const BlockParameters& p) {
    constexpr int64_t alignment = 64;  // of kernels' outputs, in elements
    std::vector<EarlyGradient> all;
    const auto add = [&](int parameter, int64_t numel) {
        if (parameter < 0) return;
        const int64_t end = all.empty() ? 0 : all.back().end();
        all.push_back({parameter, (end + alignment - 1) / alignment * alignment, numel});
    };
    for (const int i : {p.norm1_w, p.norm1_b, p.out_b, p.norm2_w, p.norm2_b}) add(i, layer.n_embd);
    const bool by_head = layer.qk_norm == QkNormKind::head;
    add(p.q_norm_w, by_head ? layer.head_size : layer.attention_width());
    add(p.k_norm_w, by_head ? layer.head_size : layer.kv_width());
    add(p.sinks, layer.n_head);
    return all;
}

BackwardPass::BackwardPass(Stream& stream_, Gradients& gradients_, const Block& block_,
                           const BlockGradients& g_, Recompute recompute_, Backward part)
    : stream(stream_),
      gradients(gradients_),
      block(block_),
      g(g_),
      recompute(recompute_),
      inputs(part != Backward::weights),
      weights(part != Backward::inputs),
      apart(part != Backward::both),
      early_(g.early ? early_gradients(block.layer, block.parameters)
                     : std::vector<EarlyGradient>()) {}

Tensor BackwardPass::gather_dres(Tensor copy) const {
    return block.residual.gather_gradient(stream, inputs ? g.dres : copy);
}

void BackwardPass::keep_dres(Tensor copy_) const {
    if (inputs && apart) copy(stream, copy_.data, g.dres.data, g.dres.bytes());
}

void BackwardPass::restore(const StreamNorm& of) const {
    const bool kept = tensor().options().keep_gathered;
    if (inputs && recomputes_elementwise() && !kept)
        block.residual.norm(stream, of, {}, weights);
    else if (weights && of.out_rows)
        block.residual.gather_again(stream, of);
}

// The reciprocal of the scale lies in front of the codes.
constexpr int64_t front_of_codes = 256;

size_t rounded_gradient_bytes(int64_t rows, int64_t cols) {
    return static_cast<size_t>(front_of_codes + 2 * rows * cols);
}

Fp8Matrix BackwardPass::rounded_gradient(Tensor dy, int weight) const {
    const ProductScales* const of = block.scales(weight);
    if (!g.rounded || !inputs || !weights || !of || !of->weight_gradient || fp8_was_refused(stream))
        return {};
    const int64_t rows = dy.rows(), cols = dy.cols();
    assert(g.rounded.bytes() >= rounded_gradient_bytes(rows, cols));
    auto* const codes = static_cast<std::byte*>(g.rounded.data) + front_of_codes;
    auto* const inverse = static_cast<float*>(g.rounded.data);
    const Fp8Matrix both{.codes = Tensor(codes, DType::uint8, {rows, cols}),
                         .transposed = Tensor(codes + rows * cols, DType::uint8, {cols, rows}),
                         .inverse = inverse};
    fp8_round(stream, {.codes = both.codes,
                       .transposed = both.transposed,
                       .inverse = inverse,
                       .x = dy,
                       .format = Fp8Format::e5m2,
                       .scaling = of->dy});
    return both;
}

void BackwardPass::input_gradient(Tensor dx, Tensor dy, int weight, Tensor preact,
                                  const Fp8Matrix& rounded_dy) const {
    block.residual.for_each_chunk(stream, Lane::gradients, dy.rows(), [&](Range rows) {
        linear_backward_input(stream, {.dx = rows_of(dx, rows),
                                       .dy = rows_of(dy, rows),
                                       .w = block.operand(weight),
                                       .preact = rows_of(preact, rows),
                                       .rounded_dy = rounded_dy});
    });
}

void BackwardPass::norm_output_gradient(Tensor dy, int weight, const Fp8Matrix& rounded_dy) const {
    block.residual.add_input_gradient(stream, g.dy, dy, block.operand(weight), rounded_dy);
}

void BackwardPass::add_weight_gradient(int weight, int bias, Tensor x, Tensor dy,
                                       const Fp8Matrix& rounded,
                                       const Fp8Matrix& rounded_dy) const {
    linear_backward_weight(stream, {.dw = gradients.sink(stream, weight),
                                    .x = x,
                                    .dy = dy,
                                    .dbias = gradients.sink(stream, bias),
                                    .scales = block.scales(weight),
                                    .rounded_x = rounded,
                                    .rounded_dy = rounded_dy});
}

void BackwardPass::weight_gradient(int weight, int bias, Tensor x, Tensor dy,
                                   const Fp8Matrix& rounded, const Fp8Matrix& rounded_dy) const {
    if (!weights) return;
    tensor().wait(stream, Lane::gradients);
    add_weight_gradient(weight, bias, x, dy, rounded, rounded_dy);
}

void BackwardPass::weight_gradient_of_norm(int weight, int bias, Tensor x, Tensor dy,
                                           const Fp8Matrix& rounded,
                                           const Fp8Matrix& rounded_dy) const {
    if (!weights) return;
    wait_for_norm();
    add_weight_gradient(weight, bias, x, dy, rounded, rounded_dy);
}

void BackwardPass::wait_for_norm() const { tensor().wait(stream, Lane::inputs); }

void BackwardPass::clear_gradient(int parameter) const {
    const GradientSink to = gradients.sink(stream, parameter);
    if (to && !to.accumulate) clear(stream, to.data, gradients.bytes_of(parameter));
}

GradientSink BackwardPass::early_sink(int i) const {
    for (const EarlyGradient& kept : early_)
        if (kept.parameter == i) return {g.early.as<float>() + kept.offset, DType::fp32, false};
    assert(i < 0 || early_.empty());  // early_gradients() lists all that come early
    return gradients.sink(stream, i);
}

void BackwardPass::norm_gradients(const StreamNorm& of, int w, int b, int bias) const {
    tensor().wait(stream, Lane::sums);
    block.residual.norm_backward(stream, of,
                                 {.dres = g.dres,
                                  .dy = g.dy,
                                  .dw = early_sink(w),
                                  .db = early_sink(b),
                                  .dbias = early_sink(bias)});
}

void BackwardPass::add_early_gradients() const {
    if (inputs) return;
    for (const EarlyGradient& kept : early_) {
        const GradientSink to = gradients.sink(stream, kept.parameter);
        widen(stream, static_cast<float*>(to.data), g.early.as<float>() + kept.offset, DType::fp32,
              kept.numel, to.accumulate);
    }
}

}  // namespace train_gpt
