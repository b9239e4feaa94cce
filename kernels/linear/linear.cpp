#include "kernels/linear/linear.h"

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "device/profile.h"
#include "kernels/gelu_math.h"
#include "kernels/lanes.h"
#include "kernels/linear/column_sums.h"
#include "kernels/linear/gemm.h"

namespace train_gpt {

namespace {

using Library = KernelSettings::Gemm;

#ifdef TRAIN_GPT_ONEDNN
/// Whether this is an fp32 product that oneDNN computes slowly because it reads B in place. Our own
/// kernel copies B and is not affected.
bool onednn_is_slow(const GemmShape& shape) {
    if (shape.in != DType::fp32 || shape.op == GemmOp::nt || onednn_copies(shape)) return false;
    // Rows of B that are a multiple of a page apart fall into the same cache sets: this leaves
    // two thirds of the speed on some Xeons.
    const bool rows_alias = shape.n % 1024 == 0;
    // dx of the head sums over the vocabulary: this costs 15 to 30 %. With few rows, the copy does
    // not pay off.
    const bool deep = shape.op == GemmOp::nn && shape.k > 8192 && shape.m >= 128;
    return rows_alias || deep;
}

bool use_onednn(Library library, const GemmShape& shape) {
    if (library == Library::own || !onednn_supports(shape)) return false;
    return library == Library::onednn || !onednn_is_slow(shape);
}

/// The shape for oneDNN with the weight, here B, packed, if that pays off. In fp32, packing costs
/// about as much as 60 of the rows that use it, and makes the others up to 1.2 (Zen 5) or 1.7 times
/// (Xeons) as fast; in bf16 the gain equals the cost. A library that copies the weight anyway gains
/// nothing. rows: the total of all products with this weight.
std::optional<GemmShape> packed(Library library, GemmShape shape, int64_t rows) {
    constexpr int64_t most_bytes = 64 << 20;  // of scratch; not enough for the weight of a head
    if (shape.in != DType::fp32 || shape.op == GemmOp::tn || rows < 1024) return {};
    if (shape.n * shape.k * static_cast<int64_t>(sizeof(float)) > most_bytes) return {};
    if (library == Library::own || onednn_copies(shape)) return {};
    shape.packed = true;
    if (!onednn_supports(shape)) return {};
    return shape;
}

size_t gemm_scratch_bytes(Library library, const GemmShape& shape, int64_t rows) {
    size_t bytes = own_gemm_scratch_bytes(shape);
    if (use_onednn(library, shape)) bytes = std::max(bytes, onednn_gemm_scratch_bytes(shape));
    if (const auto with = packed(library, shape, rows))
        bytes = std::max(bytes, onednn_packed_bytes(*with) + onednn_gemm_scratch_bytes(*with));
    return bytes;
}

/// The products of one matrix B with `rows` rows in total, a range of them at a time.
class ProductsWithB {
  public:
    ProductsWithB(const Stream& stream, int64_t rows)
        : stream_(stream), library_(stream.settings.gemm), rows_(rows) {}

    void operator()(const GemmShape& shape, GemmOperands operands) {
        // For fewer rows, oneDNN may need more scratch than linear_scratch_bytes was asked about.
        if (const auto with = packed(library_, shape, rows_);
            with && multiply_packed(*with, operands))
            return;
        packed_.reset();
        if (use_onednn(library_, shape) &&
            onednn_gemm_scratch_bytes(shape) <= stream_.scratch_bytes) {
            onednn_gemm(shape, operands, stream_.scratch);
        } else {
            own_gemm(shape, operands, stream_.scratch_for<void>(own_gemm_scratch_bytes(shape)));
        }
    }

  private:
    bool multiply_packed(const GemmShape& shape, GemmOperands operands) {
        const size_t copy = onednn_packed_bytes(shape);
        if (copy + onednn_gemm_scratch_bytes(shape) > stream_.scratch_bytes) return false;
        if (!packed_ || !onednn_packs_alike(*packed_, shape)) {
            onednn_pack(shape, operands.b, stream_.scratch);
            packed_ = shape;
        }
        operands.b = stream_.scratch;
        onednn_gemm(shape, operands, static_cast<char*>(stream_.scratch) + copy);
        return true;
    }

    const Stream& stream_;
    Library library_;
    int64_t rows_;
    std::optional<GemmShape> packed_;  // the shape for which scratch begins with a packed B
};
#else
size_t gemm_scratch_bytes(Library, const GemmShape& shape, int64_t) {
    return own_gemm_scratch_bytes(shape);
}

class ProductsWithB {
  public:
    ProductsWithB(const Stream& stream, int64_t) : stream_(stream) {}

    void operator()(const GemmShape& shape, const GemmOperands& operands) {
        own_gemm(shape, operands, stream_.scratch_for<void>(own_gemm_scratch_bytes(shape)));
    }

  private:
    const Stream& stream_;
};
#endif

/// How many of a product's M rows are finished before an element-wise pass goes over them: few
/// enough that they are still in the cache, enough that the library's copy of the weight, which it
/// makes again for each product, does not matter.
int64_t epilogue_rows(int64_t M, int64_t cols, DType dtype) {
    constexpr int64_t cache_bytes = 4 << 20, tile = 32;
    const int64_t most =
        std::max<int64_t>(256, cache_bytes / (cols * static_cast<int64_t>(size_of(dtype))));
    const int64_t ranges = std::max<int64_t>(1, M / most);
    return (M + ranges * tile - 1) / (ranges * tile) * tile;
}

int64_t slab_count(int64_t M) { return (M + slab_rows - 1) / slab_rows; }

size_t column_sum_scratch_bytes(int64_t M, int64_t N) {
    return static_cast<size_t>(slab_count(M) * N) * sizeof(float);
}

/// sink (+)= column sums of dy [M, N]
void column_sums(const Stream& stream, const GradientSink& sink, const Tensor& dy) {
    assert(sink.dtype == DType::fp32);
    const int64_t M = dy.rows(), N = dy.cols(), slabs = slab_count(M);
    constexpr int64_t total_cols = 64;  // per item of the second pass: whole cache lines
    auto* partials = stream.scratch_for<float>(column_sum_scratch_bytes(M, N));
    auto* out = static_cast<float*>(sink.data);
    const bool accumulate = sink.accumulate;
    with_float_type(dy.dtype, [&](auto type) {
        using T = decltype(type);
        const T* source = dy.as<T>();
#pragma omp parallel
        {
#pragma omp for collapse(2) schedule(static)
            for (int64_t slab = 0; slab < slabs; ++slab) {
                for (int64_t col = 0; col < N; col += slab_cols) {
                    const int64_t row = slab * slab_rows;
                    sum_slab(partials + slab * N + col, source + row * N + col,
                             std::min(slab_rows, M - row), std::min(slab_cols, N - col), N);
                }
            }
#pragma omp for schedule(static)
            for (int64_t first = 0; first < N; first += total_cols) {
                const int64_t last = std::min(N, first + total_cols);
                // The first slab's partials hold the total.
                for (int64_t slab = 1; slab < slabs; ++slab) {
                    const float* sums = partials + slab * N;
#pragma omp simd
                    for (int64_t j = first; j < last; ++j) partials[j] += sums[j];
                }
                for (int64_t j = first; j < last; ++j)
                    out[j] = accumulate ? out[j] + partials[j] : partials[j];
            }
        }
    });
}

bool is_matrix(const Tensor& tensor, int64_t rows, int64_t cols, DType dtype) {
    return tensor.rows() == rows && tensor.cols() == cols && tensor.dtype == dtype;
}

}  // namespace

bool products_depend_on_threads(const Stream& stream) {
#ifdef TRAIN_GPT_ONEDNN
    return !stream.device.is_cuda() && stream.settings.gemm != Library::own;
#else
    (void)stream;
    return false;
#endif
}

void linear_forward(Stream& stream, const LinearForward& args) {
    const Profiled profiled(stream, cost_of(args));
    TRAIN_GPT_ON_CUDA(stream.device, linear_forward(stream, args));
    const Tensor& w = args.w.values;
    const DType dtype = args.x.dtype, out_dtype = args.out.dtype;
    const int64_t M = args.x.rows(), K = args.x.cols(), N = w.rows();
    assert(is_matrix(w, N, K, dtype) && is_matrix(args.out, M, N, out_dtype));
    assert(out_dtype == dtype || (out_dtype == DType::fp32 && !args.residual && !args.preact));
    assert(!args.bias || (args.bias.numel() == N && args.bias.dtype == dtype));
    assert(!args.residual || (is_matrix(args.residual, M, N, dtype) && !args.preact));
    assert(!args.preact || is_matrix(args.preact, M, N, dtype));
    if (args.w.scales) return linear_forward_fp8(stream, args);

    ProductsWithB products(stream, M);
    const auto product = [&](Tensor out, Tensor x) {
        const GemmShape shape{
            GemmOp::nt, dtype, out_dtype, bool{args.bias}, bool{args.residual}, false,
            x.rows(),   N,     K};
        products(shape, {out.data, x.data, w.data, args.bias.data, args.residual.data});
    };
    if (!args.preact) {
        product(args.out, args.x);
        return;
    }
    const int64_t step = epilogue_rows(M, N, dtype);
    for (int64_t row = 0; row < M; row += step) {
        const int64_t rows = std::min(step, M - row);
        const Tensor preact = args.preact.row_range(row, rows);
        product(preact, args.x.row_range(row, rows));
        with_float_type(dtype, [&](auto type) {
            using T = decltype(type);
            const T* in = preact.as<T>();
            T* out = args.out.row_range(row, rows).template as<T>();
#pragma omp parallel for simd schedule(static)
            for (int64_t i = 0; i < rows * N; ++i) store(out[i], gelu(to_float(in[i])));
        });
    }
}

void linear_backward_input(Stream& stream, const LinearBackwardInput& args) {
    const Profiled profiled(stream, cost_of(args));
    TRAIN_GPT_ON_CUDA(stream.device, linear_backward_input(stream, args));
    const DType dtype = args.dy.dtype;
    const Tensor& w = args.w.values;
    const int64_t M = args.dy.rows(), N = args.dy.cols(), K = w.cols();
    const DType dx_dtype = args.dx.dtype;
    assert(is_matrix(w, N, K, dtype) && is_matrix(args.dx, M, K, dx_dtype));
    assert(dx_dtype == dtype || (dx_dtype == DType::fp32 && !args.preact));
    assert(!args.preact || is_matrix(args.preact, M, K, dtype));
    if (args.w.scales) return linear_backward_input_fp8(stream, args);

    ProductsWithB products(stream, M);
    const auto product = [&](Tensor dx, Tensor dy) {
        const GemmShape shape{GemmOp::nn, dtype, dx_dtype, false, false, false, dy.rows(), K, N};
        products(shape, {dx.data, dy.data, w.data});
    };
    if (!args.preact) {
        product(args.dx, args.dy);
        return;
    }
    const int64_t step = epilogue_rows(M, K, dtype);
    for (int64_t row = 0; row < M; row += step) {
        const int64_t rows = std::min(step, M - row);
        const Tensor dx = args.dx.row_range(row, rows);
        product(dx, args.dy.row_range(row, rows));
        with_float_type(dtype, [&](auto type) {
            using T = decltype(type);
            const T* preact = args.preact.row_range(row, rows).template as<T>();
            T* gradient = dx.as<T>();
#pragma omp parallel for simd schedule(static)
            for (int64_t i = 0; i < rows * K; ++i) {
                store(gradient[i], to_float(gradient[i]) * gelu_derivative(to_float(preact[i])));
            }
        });
    }
}

void linear_backward_weight(Stream& stream, const LinearBackwardWeight& args) {
    const Profiled profiled(stream, cost_of(args));
    TRAIN_GPT_ON_CUDA(stream.device, linear_backward_weight(stream, args));
    const DType dtype = args.dy.dtype;
    const int64_t M = args.dy.rows(), N = args.dy.cols(), K = args.x.cols();
    assert(is_matrix(args.x, M, K, dtype) && args.dw.dtype == DType::fp32);
    const GemmShape shape{GemmOp::tn,         dtype, DType::fp32, false, false,
                          args.dw.accumulate, N,     K,           M};
    if (args.scales && args.scales->weight_gradient)
        linear_backward_weight_fp8(stream, args);
    else
        ProductsWithB(stream, N)(shape, {args.dw.data, args.dy.data, args.x.data});
    if (args.dbias) column_sums(stream, args.dbias, args.dy);
}

size_t linear_scratch_bytes(const Stream& stream, DType dtype, int64_t M, int64_t N, int64_t K) {
    if (stream.settings.fp8) {
        Stream plain = stream;
        plain.settings.fp8 = false;
        return std::max(linear_scratch_bytes(plain, dtype, M, N, K),
                        linear_fp8_scratch_bytes(plain, dtype, M, N, K));
    }
    TRAIN_GPT_ON_CUDA(stream.device, linear_scratch_bytes(dtype, M, N, K));
    size_t bytes = column_sum_scratch_bytes(M, N);
    const auto cover = [&](const GemmShape& shape) {
        bytes = std::max(bytes, gemm_scratch_bytes(stream.settings.gemm, shape, M));
    };
    const auto cover_rows = [&](int64_t rows) {
        for (bool bias : {false, true}) {
            for (bool residual : {false, true}) {
                cover({GemmOp::nt, dtype, dtype, bias, residual, false, rows, N, K});
            }
            cover({GemmOp::nt, dtype, DType::fp32, bias, false, false, rows, N, K});
        }
        for (const DType out : {dtype, DType::fp32})
            cover({GemmOp::nn, dtype, out, false, false, false, rows, K, N});
    };
    for (bool accumulate : {false, true}) {
        cover({GemmOp::tn, dtype, DType::fp32, false, false, accumulate, N, K, M});
    }
    cover_rows(M);
    for (int64_t cols : {N, K}) {
        const int64_t step = epilogue_rows(M, cols, dtype);
        if (step >= M) continue;
        cover_rows(step);
        if (M % step) cover_rows(M % step);
    }
    return bytes;
}

Cost cost_of(const LinearForward& a) {
    return {"linear_forward",
            bytes_of(a.x) + bytes_of(a.w.values) + bytes_of(a.bias) + bytes_of(a.residual) +
                bytes_of(a.preact) + bytes_of(a.out),
            product_flops(a.x, a.w.values)};
}

Cost cost_of(const LinearBackwardInput& a) {
    return {"linear_backward_input",
            bytes_of(a.dy) + bytes_of(a.w.values) + bytes_of(a.preact) + bytes_of(a.dx),
            product_flops(a.dy, a.w.values)};
}

Cost cost_of(const LinearBackwardWeight& a) {
    const int64_t N = a.dy.cols(), K = a.x.cols();
    return {"linear_backward_weight",
            bytes_of(a.x) + bytes_of(a.dy) + bytes_of(a.dw, N * K) + bytes_of(a.dbias, N),
            2.0 * static_cast<double>(a.x.numel()) * static_cast<double>(N)};
}

}  // namespace train_gpt
