// Linear layers in fp8 on the CPU. There are no fp8 units here, so the numbers of the codes, which
// fp32 and bf16 hold exactly, are multiplied in the dtype of the layer: the rounding of fp8,
// without its speed.
#include <algorithm>
#include <cassert>

#include "kernels/gelu_math.h"
#include "kernels/lanes.h"
#include "kernels/linear/linear.h"

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

/// The same of a weight, unless it has been rounded already.
Tensor rounded(Stream& stream, Pieces& pieces, const Operand& w, float& inverse) {
    if (!w.rounded) return rounded(stream, pieces, w.values, Fp8Format::e4m3, w.scales->w, inverse);
    assert(w.rounded.codes.dtype == w.values.dtype);
    inverse *= *w.rounded.inverse;
    return w.rounded.codes;
}

}  // namespace

bool fp8_was_refused(const Stream& stream) {
    TRAIN_GPT_ON_CUDA(stream.device, fp8_was_refused(stream));
    return false;
}

std::vector<std::string> fp8_refusals(const Stream& stream) {
    TRAIN_GPT_ON_CUDA(stream.device, fp8_refusals(stream));
    return {};
}

void linear_forward_fp8(Stream& stream, const LinearForward& args) {
    assert(!args.rounded_x);
    const ProductScales& scales = *args.w.scales;
    const int64_t N = args.w.values.rows(), rows = args.x.rows();
    Pieces pieces(stream);
    const Tensor sums = pieces.take(DType::fp32, rows, N);
    float factor = 1;
    const Tensor x = rounded(stream, pieces, args.x, Fp8Format::e4m3, scales.x, factor),
                 w = rounded(stream, pieces, args.w, factor);
    Stream rest = pieces.rest();
    linear_forward(rest, {.out = sums, .x = x, .w = w});
    const float* from = sums.as<float>();
    assert(args.out.dtype == args.x.dtype);
    with_float_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        const T *bias = args.bias ? args.bias.as<T>() : nullptr,
                *residual = args.residual ? args.residual.as<T>() : nullptr;
        T *preact = args.preact ? args.preact.as<T>() : nullptr, *out = args.out.as<T>();
#pragma omp parallel for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            T* to = (preact ? preact : out) + row * N;
#pragma omp simd
            for (int64_t j = 0; j < N; ++j) {
                float value = from[row * N + j] * factor;
                if (bias) value += to_float(bias[j]);
                if (residual) value += to_float(residual[row * N + j]);
                store(to[j], value);
            }
            if (!preact) continue;
#pragma omp simd
            for (int64_t j = 0; j < N; ++j) store(out[row * N + j], gelu(to_float(to[j])));
        }
    });
}

void linear_backward_input_fp8(Stream& stream, const LinearBackwardInput& args) {
    assert(!args.rounded_dy);
    const ProductScales& scales = *args.w.scales;
    Pieces pieces(stream);
    const Tensor sums = pieces.take(DType::fp32, args.dx.rows(), args.dx.cols());
    float factor = 1;
    const Tensor dy = rounded(stream, pieces, args.dy, Fp8Format::e5m2, scales.dy, factor),
                 w = rounded(stream, pieces, args.w, factor);
    Stream rest = pieces.rest();
    linear_backward_input(rest, {.dx = sums, .dy = dy, .w = w});
    const int64_t n = sums.numel();
    const float* from = sums.as<float>();
    with_float_type(args.dx.dtype, [&](auto type) {
        using T = decltype(type);
        T* dx = args.dx.as<T>();
        if (!args.preact) {
#pragma omp parallel for simd schedule(static)
            for (int64_t i = 0; i < n; ++i) store(dx[i], from[i] * factor);
            return;
        }
        const T* preact = args.preact.as<T>();
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < n; ++i)
            store(dx[i], from[i] * factor * gelu_derivative(to_float(preact[i])));
    });
}

void linear_backward_weight_fp8(Stream& stream, const LinearBackwardWeight& args) {
    assert(!args.rounded_x && !args.rounded_dy);
    const ProductScales& scales = *args.scales;
    Pieces pieces(stream);
    const Tensor sums = pieces.take(DType::fp32, args.dy.cols(), args.x.cols());
    float factor = 1;
    const Tensor dy = rounded(stream, pieces, args.dy, Fp8Format::e5m2, scales.dy, factor),
                 x = rounded(stream, pieces, args.x, Fp8Format::e4m3, scales.x, factor);
    Stream rest = pieces.rest();
    linear_backward_weight(rest, {.dw = {sums.data, DType::fp32, false}, .x = x, .dy = dy});
    const int64_t n = sums.numel();
    const float* from = sums.as<float>();
    auto* dw = static_cast<float*>(args.dw.data);
    const bool accumulate = args.dw.accumulate;
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; ++i)
        dw[i] = accumulate ? dw[i] + from[i] * factor : from[i] * factor;
}

size_t linear_fp8_scratch_bytes(const Stream& stream, DType dtype, int64_t M, int64_t N,
                                int64_t K) {
    TRAIN_GPT_ON_CUDA(stream.device, linear_fp8_scratch_bytes(M, N, K));
    const auto bytes = [](int64_t n, DType type) {
        return padded(static_cast<size_t>(n) * size_of(type));
    };
    // A product reads two of the three matrices and sums in the shape of the third.
    const int64_t sizes[] = {M * K, N * K, M * N};
    size_t most = 0;
    for (size_t sums = 0; sums < 3; ++sums)
        most =
            std::max(most, bytes(sizes[sums], DType::fp32) + bytes(sizes[(sums + 1) % 3], dtype) +
                               bytes(sizes[(sums + 2) % 3], dtype));
    return most + linear_scratch_bytes(stream, dtype, M, N, K);
}

}  // namespace train_gpt
