// On the CPU the numbers of the codes are multiplied in the dtype of the layer, as linear_fp8.cpp
// does it.
#include "kernels/experts/grouped_fp8.h"

#include <algorithm>
#include <cassert>

#include "kernels/lanes.h"

namespace train_gpt {

namespace {

constexpr size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

/// Takes a stream's scratch memory piece by piece.
class Pieces {
  public:
    explicit Pieces(const Stream& stream) : stream_(stream) {}

    Tensor take(DType dtype, int64_t rows, int64_t cols) {
        Tensor piece(nullptr, dtype, {rows, cols});
        const size_t first = taken_;
        taken_ += padded(piece.bytes());
        piece.data = stream_.scratch_for<char>(taken_) + first;
        return piece;
    }
    /// The stream with the scratch memory that is left.
    Stream rest() const {
        Stream rest = stream_;
        rest.scratch = static_cast<char*>(stream_.scratch) + taken_;
        rest.scratch_bytes = stream_.scratch_bytes - taken_;
        rest.is_part = true;
        return rest;
    }

  private:
    const Stream& stream_;
    size_t taken_ = 0;
};

/// The rows of the experts, of R.
int64_t rows_of_experts(const Tensor& offsets) {
    return offsets.as<int32_t>()[offsets.numel() - 1];
}

/// The numbers of a matrix's codes; inverse becomes inverse / scale.
Tensor rounded(Stream& stream, Pieces& pieces, const Tensor& x, Fp8Format format,
               const Fp8Scaling& scaling, float& inverse) {
    const Tensor numbers = pieces.take(x.dtype, x.rows(), x.cols());
    float of_this = 1;
    fp8_round(
        stream,
        {.codes = numbers, .inverse = &of_this, .x = x, .format = format, .scaling = scaling});
    inverse *= of_this;
    return numbers;
}

/// The same of the weights [E, N, K], unless they have been rounded already.
Tensor rounded_weight(Stream& stream, Pieces& pieces, const Operand& w, float& inverse) {
    Tensor numbers = w.rounded.codes;
    if (w.rounded)
        inverse *= *w.rounded.inverse;
    else
        numbers = rounded(stream, pieces, w.values, Fp8Format::e4m3, w.scales->w, inverse);
    const Tensor& of = w.values;
    assert(numbers.dtype == of.dtype);
    return Tensor(numbers.data, of.dtype, {of.shape[0], of.shape[1], of.shape[2]});
}

/// x[row_token[r]] for the rows of the experts.
Tensor gathered(Pieces& pieces, const Tensor& x, const Tensor& row_token, int64_t R, int64_t rows) {
    if (!row_token) return x;
    const Tensor to = pieces.take(x.dtype, R, x.cols());
    const int32_t* const token = row_token.as<int32_t>();
    const size_t row_bytes = static_cast<size_t>(x.cols()) * size_of(x.dtype);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r)
        std::copy_n(static_cast<const char*>(x.data) + static_cast<size_t>(token[r]) * row_bytes,
                    row_bytes, static_cast<char*>(to.data) + static_cast<size_t>(r) * row_bytes);
    return to;
}

/// to[r] = factor · sums[r] (+ bias_e) for each expert's rows.
void store_rows(const Tensor& to, const Tensor& sums, const Tensor& offsets, const Tensor& bias,
                float factor) {
    const int64_t E = offsets.numel() - 1, cols = to.cols();
    const auto* const first = offsets.as<int32_t>();
    with_float_type(to.dtype, [&](auto type) {
        using T = decltype(type);
        const float* const from = sums.as<float>();
        for (int64_t e = 0; e < E; ++e) {
            const T* const of_expert = bias ? bias.as<T>() + e * cols : nullptr;
#pragma omp parallel for schedule(static)
            for (int64_t r = first[e]; r < first[e + 1]; ++r) {
#pragma omp simd
                for (int64_t j = 0; j < cols; ++j) {
                    float value = from[r * cols + j] * factor;
                    if (of_expert) value += to_float(of_expert[j]);
                    store(to.as<T>()[r * cols + j], value);
                }
            }
        }
    });
}

}  // namespace

void grouped_linear_forward_fp8(Stream& stream, const GroupedLinearForward& args) {
    TRAIN_GPT_ON_CUDA(stream.device, grouped_linear_forward_fp8(stream, args));
    const int64_t R = args.out.rows(), rows = rows_of_experts(args.offsets);
    Pieces pieces(stream);
    const Tensor sums = pieces.take(DType::fp32, R, args.out.cols());
    float factor = 1;
    // Of rows that no expert has, nothing is known.
    const Tensor known = args.row_token ? args.x : args.x.row_range(0, rows);
    const Tensor x =
        gathered(pieces, rounded(stream, pieces, known, Fp8Format::e4m3, args.w.scales->x, factor),
                 args.row_token, R, rows);
    const Tensor w = rounded_weight(stream, pieces, args.w, factor);
    Stream rest = pieces.rest();
    grouped_linear_forward(rest, {.out = sums,
                                  .x = Tensor(x.data, x.dtype, {R, x.cols()}),
                                  .w = w,
                                  .offsets = args.offsets});
    store_rows(args.out, sums, args.offsets, args.bias, factor);
}

void grouped_linear_backward_input_fp8(Stream& stream, const GroupedLinearBackwardInput& args) {
    TRAIN_GPT_ON_CUDA(stream.device, grouped_linear_backward_input_fp8(stream, args));
    const int64_t R = args.dx.rows(), rows = rows_of_experts(args.offsets);
    Pieces pieces(stream);
    const Tensor sums = pieces.take(DType::fp32, R, args.dx.cols());
    float factor = 1;
    const Tensor dy = rounded(stream, pieces, args.dy.row_range(0, rows), Fp8Format::e5m2,
                              args.w.scales->dy, factor),
                 w = rounded_weight(stream, pieces, args.w, factor);
    Stream rest = pieces.rest();
    grouped_linear_backward_input(rest, {.dx = sums,
                                         .dy = Tensor(dy.data, dy.dtype, {R, dy.cols()}),
                                         .w = w,
                                         .offsets = args.offsets});
    store_rows(args.dx, sums, args.offsets, {}, factor);
}

size_t grouped_fp8_scratch_bytes(const Stream& stream, const GroupedLinearShape& shape) {
    TRAIN_GPT_ON_CUDA(stream.device, grouped_fp8_scratch_bytes(shape));
    const auto bytes = [](int64_t n, DType type) {
        return padded(static_cast<size_t>(n) * size_of(type));
    };
    // The operands, one of them also gathered, and the sums.
    const int64_t widest = shape.R * std::max(shape.N, shape.K);
    return bytes(widest, DType::fp32) + 2 * bytes(widest, shape.dtype) +
           bytes(shape.rounds_weights ? shape.E * shape.N * shape.K : 0, shape.dtype);
}

}  // namespace train_gpt
