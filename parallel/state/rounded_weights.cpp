#include "parallel/state/rounded_weights.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "device/trace.h"

namespace train_gpt {

namespace {

constexpr size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

/// A matrix [rows, cols], as products read it.
struct Shape {
    int64_t rows, cols;
    DType codes;

    Shape(const Parameter& p, const ParameterBuffers& buffers)
        : rows(p.padded[0]),
          cols(p.padded[1]),
          codes(buffers.device().is_cuda() ? DType::uint8 : buffers.dtype()) {}

    size_t code_bytes() const { return aligned(static_cast<size_t>(rows * cols) * size_of(codes)); }
    bool has_transpose() const { return codes == DType::uint8; }
    size_t bytes() const { return code_bytes() * (has_transpose() ? 2 : 1); }
};

}  // namespace

RoundedWeights::RoundedWeights(const ParameterBuffers& buffers,
                               std::vector<const ProductScales*> scales, Arena& arena) {
    const std::vector<Parameter>& parameters = buffers.parameters();
    assert(scales.size() == parameters.size());
    const auto count = std::ranges::count_if(scales, [](const auto* of) { return of != nullptr; });
    if (count == 0) return;
    buffers_ = &buffers;
    is_rounded_.resize(static_cast<size_t>(buffers.units()));
    matrices_.resize(parameters.size());

    // Where each matrix lies: in a place that its bucket shares with others, or in the common one.
    constexpr size_t places = ParameterBuffers::turns + 1;
    size_t bytes[places] = {};
    std::vector<std::pair<size_t, size_t>> at(parameters.size());  // place, offset
    for (size_t b = 0; b < buffers.layout().buckets().size(); ++b) {
        const int turn = buffers.holds_all_weights() ? -1 : buffers.turn_of_weights(b);
        const size_t place = static_cast<size_t>(turn + 1);
        size_t end = turn < 0 ? bytes[0] : 0;
        for (size_t i = 0; i < parameters.size(); ++i) {
            if (!scales[i] || buffers.first_bucket(parameters[i].unit) != b) continue;
            at[i] = {place, end};
            end += Shape(parameters[i], buffers).bytes();
        }
        bytes[place] = std::max(bytes[place], end);
    }
    std::byte* memory[places] = {};
    for (size_t place = 0; place < places; ++place)
        memory[place] = static_cast<std::byte*>(arena.take(bytes[place], Purpose::parameters));
    auto* inverse = static_cast<float*>(arena.take(
        static_cast<size_t>(count * fp8_inverse_stride) * sizeof(float), Purpose::parameters));
    for (size_t i = 0; i < parameters.size(); ++i) {
        if (!scales[i]) continue;
        Matrix& matrix = matrices_[i];
        matrix.scales = scales[i];
        if (arena.is_counting()) continue;
        const Shape shape(parameters[i], buffers);
        std::byte* const data = memory[at[i].first] + at[i].second;
        matrix.rounded.codes = Tensor(data, shape.codes, {shape.rows, shape.cols});
        if (shape.has_transpose())
            matrix.rounded.transposed =
                Tensor(data + shape.code_bytes(), shape.codes, {shape.cols, shape.rows});
        matrix.rounded.inverse = matrix.inverse = inverse;
        inverse += fp8_inverse_stride;
    }
}

void RoundedWeights::round(Stream& stream, int unit) {
    if (matrices_.empty() || is_rounded_[static_cast<size_t>(unit)]) return;
    is_rounded_[static_cast<size_t>(unit)] = true;
    const TraceSpan span(TraceTrack::device, stream, "round unit", unit);
    for (size_t i = 0; i < matrices_.size(); ++i) {
        const Matrix& matrix = matrices_[i];
        if (!matrix.scales || buffers_->parameters()[i].unit != unit) continue;
        const Tensor weight = buffers_->weight(static_cast<int>(i));
        fp8_round(stream, {.codes = matrix.rounded.codes,
                           .transposed = matrix.rounded.transposed,
                           .inverse = matrix.inverse,
                           .x = weight.reshaped({weight.rows(), weight.cols()}),
                           .format = Fp8Format::e4m3,
                           .scaling = matrix.scales->w});
    }
}

void RoundedWeights::forget(int unit) {
    if (!matrices_.empty()) is_rounded_[static_cast<size_t>(unit)] = false;
}

void RoundedWeights::forget_all() { is_rounded_.assign(is_rounded_.size(), false); }

Operand RoundedWeights::operand(int i, const Tensor& values) const {
    if (matrices_.empty() || i < 0) return values;
    const Matrix& matrix = matrices_[static_cast<size_t>(i)];
    if (!matrix.scales) return values;
    assert(is_rounded_[static_cast<size_t>(buffers_->parameters()[static_cast<size_t>(i)].unit)]);
    return {values, matrix.scales, matrix.rounded};
}

}  // namespace train_gpt
