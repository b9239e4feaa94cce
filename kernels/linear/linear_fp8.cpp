// Linear layers in fp8 on the CPU. All three products are a·bᵀ of two rounded matrices, as on a GPU.
// There are no fp8 units here, so the numbers of the codes, which fp32 and bf16 hold exactly, are
// multiplied in the dtype of the layer: the rounding of fp8, without its speed.
#include <algorithm>
#include <array>
#include <cassert>

#include "kernels/gelu_math.h"
#include "kernels/lanes.h"
#include "kernels/linear/linear.h"

namespace train_gpt {

namespace {

/// The numbers of all codes.
template <class Format, class T>
std::array<T, 256> numbers_of_codes() {
    std::array<T, 256> numbers;
    for (size_t code = 0; code < numbers.size(); ++code)
        numbers[code] = T(fp8_value<Format>(static_cast<uint8_t>(code)));
    return numbers;
}

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

/// A matrix of a product, or its transpose.
struct Rounded {
    Tensor x;
    Fp8Format format;
    Fp8Scaling scaling;
    bool transposed = false;

    int64_t rows() const { return transposed ? x.cols() : x.rows(); }
    int64_t cols() const { return transposed ? x.rows() : x.cols(); }
};

/// The numbers of its codes; inverse = 1 / scale.
Tensor numbers_of(Stream& stream, Pieces& pieces, const Rounded& matrix, float& inverse) {
    const Tensor codes = pieces.take(DType::uint8, matrix.rows(), matrix.cols()),
                 numbers = pieces.take(matrix.x.dtype, matrix.rows(), matrix.cols());
    fp8_round(stream, {.codes = matrix.transposed ? Tensor{} : codes,
                       .transposed = matrix.transposed ? codes : Tensor{},
                       .inverse = &inverse,
                       .x = matrix.x,
                       .format = matrix.format,
                       .scaling = matrix.scaling});
    with_float_type(numbers.dtype, [&](auto type) {
        using T = decltype(type);
        static const std::array<T, 256> e4m3 = numbers_of_codes<E4M3, T>(),
                                        e5m2 = numbers_of_codes<E5M2, T>();
        const T* const of = (matrix.format == Fp8Format::e4m3 ? e4m3 : e5m2).data();
        const auto* from = static_cast<const uint8_t*>(codes.data);
        T* to = numbers.as<T>();
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < numbers.numel(); ++i) to[i] = of[from[i]];
    });
    return numbers;
}

/// The sums of products of codes, and what to multiply them with.
struct Sums {
    Tensor codes;  // fp32
    float inverse = 1;
};

/// a·bᵀ
Sums product(Stream& stream, const Rounded& a, const Rounded& b) {
    assert(a.cols() == b.cols());
    assert(a.cols() % fp8_multiple == 0 && b.rows() % fp8_multiple == 0);
    Pieces pieces(stream);
    Sums sums{pieces.take(DType::fp32, a.rows(), b.rows())};
    float of_a = 1, of_b = 1;
    const Tensor x = numbers_of(stream, pieces, a, of_a), w = numbers_of(stream, pieces, b, of_b);
    Stream rest = pieces.rest();
    linear_forward(rest, {.out = sums.codes, .x = x, .w = w});
    sums.inverse = of_a * of_b;
    return sums;
}

size_t product_bytes(const Stream& stream, DType dtype, int64_t M, int64_t N, int64_t K) {
    const auto bytes = [](int64_t n, DType type) {
        return padded(static_cast<size_t>(n) * size_of(type));
    };
    size_t all = bytes(M * N, DType::fp32) + linear_scratch_bytes(stream, dtype, M, N, K);
    for (const int64_t n : {M * K, N * K}) all += bytes(n, DType::uint8) + bytes(n, dtype);
    return all;
}

}  // namespace

void linear_forward_fp8(Stream& stream, const LinearForward& args) {
    const ProductScales& scales = *args.w.scales;
    const auto [sums, inverse] = product(stream, {args.x, Fp8Format::e4m3, scales.x},
                                         {args.w.values, Fp8Format::e4m3, scales.w});
    const float factor = inverse;
    const int64_t N = sums.cols(), rows = sums.rows();
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
    const ProductScales& scales = *args.w.scales;
    const auto [sums, inverse] = product(stream, {args.dy, Fp8Format::e5m2, scales.dy},
                                         {args.w.values, Fp8Format::e4m3, scales.w, true});
    const float factor = inverse;
    const int64_t n = sums.numel();
    const float* from = sums.as<float>();
    with_float_type(args.dx.dtype, [&](auto type) {
        using T = decltype(type);
        const T* preact = args.preact ? args.preact.as<T>() : nullptr;
        T* dx = args.dx.as<T>();
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < n; ++i) {
            const float value = from[i] * factor;
            store(dx[i], preact ? value * gelu_derivative(to_float(preact[i])) : value);
        }
    });
}

void linear_backward_weight_fp8(Stream& stream, const LinearBackwardWeight& args) {
    const ProductScales& scales = *args.scales;
    const auto [sums, inverse] = product(stream, {args.dy, Fp8Format::e5m2, scales.dy, true},
                                         {args.x, Fp8Format::e4m3, scales.x, true});
    const float factor = inverse;
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
    return std::max({product_bytes(stream, dtype, M, N, K), product_bytes(stream, dtype, M, K, N),
                     product_bytes(stream, dtype, N, K, M)});
}

}  // namespace train_gpt
