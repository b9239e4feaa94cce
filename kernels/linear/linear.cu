// Linear layers: products through cuBLASLt, with its epilogues where it has them; the kernels here
// do the rest.
#include <algorithm>
#include <cstdint>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/gelu_math.cuh"
#include "kernels/linear/fp8_operands.h"
#include "kernels/linear/gemm_cublas.h"
#include "kernels/linear/linear.h"

namespace train_gpt::cuda {

namespace {

// --- element-wise --------------------------------------------------------------------------------

constexpr int threads_per_block = 256;

/// The number of blocks for `count` independent pieces of work, one per thread. If there are more
/// pieces than threads, the threads loop over them.
int grid_for(const Stream& stream, int64_t count) {
    constexpr int blocks_per_multiprocessor = 8;  // 2048 threads
    return static_cast<int>(
        std::min<int64_t>(ceil_div<int64_t>(count, threads_per_block),
                          limits_of(stream).multiprocessors * blocks_per_multiprocessor));
}

/// Does what the product's epilogue could not: values [rows, cols] += bias [cols] if there is a
/// bias, and activated = gelu(values) if `activated` is not null. Reads and writes each element
/// once. width divides cols or, without a bias, count.
template <class T, int width, class Bias = T>
__global__ void __launch_bounds__(threads_per_block)
    finish_forward(T* values, T* activated, const Bias* bias, int64_t count, int64_t cols) {
    const int64_t stride = int64_t{gridDim.x} * threads_per_block * width;
    for (int64_t i = (int64_t{blockIdx.x} * threads_per_block + threadIdx.x) * width; i < count;
         i += stride) {
        Vector<T, width> own = Vector<T, width>::load(values + i);
        if (bias) {
            const Vector<Bias, width> addend = Vector<Bias, width>::load(bias + i % cols);
#pragma unroll
            for (int e = 0; e < width; ++e)
                own.values[e] = from_float<T>(to_float(own.values[e]) + to_float(addend.values[e]));
            own.store(values + i);
        }
        if (activated) {
#pragma unroll
            for (int e = 0; e < width; ++e)
                own.values[e] = from_float<T>(gelu<T>(to_float(own.values[e])));
            own.store(activated + i);
        }
    }
}

/// gradient [count] ⊙= gelu'(preact [count]); count is a multiple of width.
template <class T, int width>
__global__ void __launch_bounds__(threads_per_block)
    multiply_by_slope(T* gradient, const T* preact, int64_t count) {
    const int64_t stride = int64_t{gridDim.x} * threads_per_block * width;
    for (int64_t i = (int64_t{blockIdx.x} * threads_per_block + threadIdx.x) * width; i < count;
         i += stride) {
        Vector<T, width> own = Vector<T, width>::load(gradient + i);
        const Vector<T, width> at = Vector<T, width>::load(preact + i);
#pragma unroll
        for (int e = 0; e < width; ++e)
            own.values[e] =
                from_float<T>(to_float(own.values[e]) * gelu_derivative<T>(to_float(at.values[e])));
        own.store(gradient + i);
    }
}

void launch_finish_forward(Stream& stream, Tensor values, Tensor activated, Tensor bias) {
    if (bias && bias.dtype != values.dtype) {  // fp32 logits of a router in bf16
        finish_forward<float, 1>
            <<<grid_for(stream, values.numel()), threads_per_block, 0, stream_of(stream)>>>(
                static_cast<float*>(values.data), static_cast<float*>(nullptr),
                static_cast<const __nv_bfloat16*>(bias.data), values.numel(), values.cols());
        CUDA_CHECK_LAUNCH();
        return;
    }
    with_element_type(values.dtype, [&](auto type) {
        using T = decltype(type);
        const int64_t count = values.numel(), cols = values.cols();
        const bool aligned =
            is_aligned(values.data) && is_aligned(activated.data) && is_aligned(bias.data);
        with_width<T>(bias ? cols : count, aligned, [&](auto width) {
            finish_forward<T, width>
                <<<grid_for(stream, count / width), threads_per_block, 0, stream_of(stream)>>>(
                    static_cast<T*>(values.data), static_cast<T*>(activated.data),
                    static_cast<const T*>(bias.data), count, cols);
            CUDA_CHECK_LAUNCH();
        });
    });
}

void launch_multiply_by_slope(Stream& stream, Tensor gradient, Tensor preact) {
    with_element_type(gradient.dtype, [&](auto type) {
        using T = decltype(type);
        const int64_t count = gradient.numel();
        with_width<T>(count, is_aligned(gradient.data) && is_aligned(preact.data), [&](auto width) {
            multiply_by_slope<T, width>
                <<<grid_for(stream, count / width), threads_per_block, 0, stream_of(stream)>>>(
                    static_cast<T*>(gradient.data), static_cast<const T*>(preact.data), count);
            CUDA_CHECK_LAUNCH();
        });
    });
}

// --- column sums ---------------------------------------------------------------------------------
// In two passes: slices of rows are summed into fp32 partials, then the partials are summed, always
// in the same order. How the rows are divided depends only on M, so the bits do not depend on the
// GPU.

/// Long enough that the partials are 1/64 of bf16 gradients, short enough that 16k rows of 768
/// columns fill an H200.
constexpr int64_t slice_rows = 128;
constexpr int slice_warps = threads_per_block / warp_size;

int64_t slice_count(int64_t M) { return ceil_div(M, slice_rows); }

/// partials [slices, N] = sums over slices of slice_rows rows of dy [M, N]. A block takes one slice
/// and 32·width columns. A warp reads whole vectors of a row (512 bytes if width is a whole pack);
/// its rows are slice_warps apart. N is a multiple of width.
template <class T, int width>
__global__ void __launch_bounds__(threads_per_block)
    sum_slices(float* partials, const T* dy, int64_t M, int64_t N, int64_t tiles) {
    constexpr int columns = warp_size * width;
    // Element e of all lanes is stored contiguously, followed by a gap, so that both the writes and
    // the reads in column order touch each bank once.
    constexpr int stride = warp_size + warp_size / width;
    __shared__ float shared[slice_warps][width * stride];
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    const int64_t slice = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int64_t column = tile * columns + lane * width;
    const int64_t first = slice * slice_rows,
                  last = first + slice_rows < M ? first + slice_rows : M;

    float sums[width] = {};
    if (column < N) {
        // Each thread has four 16-byte loads in flight, which is 80 KiB or more per multiprocessor.
        constexpr int rows_at_once = 4;
        for (int64_t row = first + warp; row < last; row += rows_at_once * slice_warps) {
            Vector<T, width> vectors[rows_at_once] = {};
#pragma unroll
            for (int i = 0; i < rows_at_once; ++i)
                if (row + i * slice_warps < last)
                    vectors[i] = Vector<T, width>::load(dy + (row + i * slice_warps) * N + column);
#pragma unroll
            for (int i = 0; i < rows_at_once; ++i) {
#pragma unroll
                for (int e = 0; e < width; ++e) sums[e] += to_float(vectors[i].values[e]);
            }
        }
    }
#pragma unroll
    for (int e = 0; e < width; ++e) shared[warp][e * stride + lane] = sums[e];
    __syncthreads();
    if (threadIdx.x < columns && tile * columns + threadIdx.x < N) {
        const int at =
            static_cast<int>(threadIdx.x) % width * stride + static_cast<int>(threadIdx.x) / width;
        float total = 0;
#pragma unroll
        for (int w = 0; w < slice_warps; ++w) total += shared[w][at];
        partials[slice * N + tile * columns + threadIdx.x] = total;
    }
}

/// out [N] (+)= column sums of partials [slices, N]. A block takes 32 columns; its warps take the
/// slices in turn.
constexpr int partial_warps = 32;
__global__ void __launch_bounds__(partial_warps* warp_size)
    sum_partials(float* out, const float* partials, int64_t slices, int64_t N, bool accumulate) {
    __shared__ float shared[partial_warps][warp_size];
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    const int64_t column = int64_t{blockIdx.x} * warp_size + lane;
    float sum = 0;
    if (column < N) {
#pragma unroll 4
        for (int64_t slice = warp; slice < slices; slice += partial_warps)
            sum += partials[slice * N + column];
    }
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= N) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < partial_warps; ++w) total += shared[w][lane];
    out[column] = accumulate ? out[column] + total : total;
}

void launch_sum_partials(Stream& stream, const GradientSink& sink, const float* partials,
                         int64_t slices, int64_t N) {
    sum_partials<<<static_cast<unsigned>(ceil_div<int64_t>(N, warp_size)),
                   partial_warps * warp_size, 0, stream_of(stream)>>>(
        static_cast<float*>(sink.data), partials, slices, N, sink.accumulate);
    CUDA_CHECK_LAUNCH();
}

size_t column_sum_scratch_bytes(int64_t M, int64_t N) {
    return static_cast<size_t>(slice_count(M) * N) * sizeof(float);
}

/// sink (+)= column sums of dy [M, N]
void column_sums(Stream& stream, const GradientSink& sink, const Tensor& dy) {
    const int64_t M = dy.rows(), N = dy.cols(), slices = slice_count(M);
    auto* partials = stream.scratch_for<float>(column_sum_scratch_bytes(M, N));
    with_element_type(dy.dtype, [&](auto type) {
        using T = decltype(type);
        with_width<T>(N, is_aligned(dy.data), [&](auto width) {
            const int64_t tiles = ceil_div<int64_t>(N, warp_size * width);
            sum_slices<T, width>
                <<<static_cast<unsigned>(slices * tiles), threads_per_block, 0,
                   stream_of(stream)>>>(partials, static_cast<const T*>(dy.data), M, N, tiles);
            CUDA_CHECK_LAUNCH();
        });
    });
    launch_sum_partials(stream, sink, partials, slices, N);
}

// A product that sums columns finds its workspace in front of the sums.
size_t weight_gradient_scratch_bytes(int64_t N, int64_t K) {
    return gemm_workspace_bytes(N, K) + static_cast<size_t>(N) * sizeof(float);
}
float* sums_in_scratch(const Stream& stream, int64_t N, int64_t K) {
    return stream.scratch_for<float>(weight_gradient_scratch_bytes(N, K)) +
           gemm_workspace_bytes(N, K) / sizeof(float);
}

}  // namespace

void linear_forward(Stream& stream, const LinearForward& args) {
    const DType dtype = args.x.dtype;
    const Tensor product = args.preact ? args.preact : args.out;
    Gemm call{.op = GemmOp::nt,
              .in = dtype,
              .out = args.out.dtype,
              .m = args.x.rows(),
              .n = args.w.values.rows(),
              .k = args.x.cols(),
              .d = product.data,
              .a = args.x.data,
              .b = args.w.values.data,
              .residual = args.residual.data,
              .vector = args.bias.data};
    if (const ProductScales* scales = args.w.scales)
        round_operands(stream, call, scales->name,
                       {.x = args.x,
                        .scaling = scales->x,
                        .rounded = args.rounded_x,
                        .has_values = !args.rounded_x},
                       {.x = args.w.values, .scaling = scales->w, .rounded = args.w.rounded});
    const auto separate = [&] {
        Gemm plain = call;
        Tensor missing_bias;
        plain.epilogue = args.bias ? Epilogue::bias : Epilogue::none;
        // An epilogue adds a bias of the result's dtype.
        const bool other_dtype = args.bias && args.bias.dtype != args.out.dtype;
        if (other_dtype || !gemm(stream, plain)) {
            missing_bias = args.bias;
            plain.epilogue = Epilogue::none;
            plain.vector = nullptr;
            gemm(stream, plain);
        }
        if (missing_bias || args.preact)
            launch_finish_forward(stream, product, args.preact ? args.out : Tensor{}, missing_bias);
    };
    // cuBLASLt applies GELU to the sum in fp32, before it is rounded into preact. Nothing is
    // documented about the accuracy of its tanh, so only bf16 uses it.
    if (!args.preact || dtype != DType::bf16 || args.gelu_of_preact) return separate();
    Gemm fused = call;
    fused.epilogue = args.bias ? Epilogue::bias_gelu : Epilogue::gelu;
    fused.d = args.out.data;
    fused.aux = args.preact.data;
    gemm(stream, fused, separate);
}

void linear_backward_input(Stream& stream, const LinearBackwardInput& args) {
    const DType dtype = args.dy.dtype;
    Gemm call{.op = GemmOp::nn,
              .in = dtype,
              .out = dtype,
              .m = args.dy.rows(),
              .n = args.w.values.cols(),
              .k = args.dy.cols(),
              .d = args.dx.data,
              .a = args.dy.data,
              .b = args.w.values.data};
    const auto separate = [&] {
        gemm(stream, call);
        if (args.preact) launch_multiply_by_slope(stream, args.dx, args.preact);
    };
    if (const ProductScales* scales = args.w.scales) {
        round_operands(stream, call, scales->name,
                       {.x = args.dy,
                        .format = Fp8Format::e5m2,
                        .scaling = scales->dy,
                        .rounded = args.rounded_dy},
                       {.x = args.w.values,
                        .scaling = scales->w,
                        .transposed = true,
                        .rounded = args.w.rounded});
        // cuBLASLt has no such epilogue for fp8.
        if (call.fp8 != Fp8Operands::none) return separate();
    }
    if (!args.preact || dtype != DType::bf16) return separate();
    Gemm fused = call;
    fused.epilogue = Epilogue::dgelu;
    fused.aux = args.preact.data;
    gemm(stream, fused, separate);
}

void linear_backward_weight(Stream& stream, const LinearBackwardWeight& args) {
    Gemm call{.op = GemmOp::tn,
              .in = args.dy.dtype,
              .out = DType::fp32,
              .m = args.dy.cols(),
              .n = args.x.cols(),
              .k = args.dy.rows(),
              .accumulate = args.dw.accumulate,
              .d = args.dw.data,
              .a = args.dy.data,
              .b = args.x.data};
    const auto separate = [&] {
        gemm(stream, call);
        if (args.dbias) column_sums(stream, args.dbias, args.dy);
    };
    if (const ProductScales* scales = args.scales; scales && scales->weight_gradient) {
        round_operands(stream, call, scales->name,
                       {.x = args.dy,
                        .format = Fp8Format::e5m2,
                        .scaling = scales->dy,
                        .transposed = true,
                        .rounded = args.rounded_dy},
                       {.x = args.x,
                        .scaling = scales->x,
                        .transposed = true,
                        .rounded = args.rounded_x,
                        .has_values = !args.rounded_x});
        if (call.fp8 != Fp8Operands::none) return separate();  // sums of columns are of dy itself
    }
    // Only where both or none accumulate, both can be repeated when none does, for timing.
    if (!args.dbias || args.dbias.accumulate != args.dw.accumulate) return separate();
    // cuBLASLt can only overwrite with column sums, so those of later micro-batches pass through
    // scratch: they are computed in the same way as those of the first.
    const int64_t N = call.m;
    float* const sums = args.dbias.accumulate ? sums_in_scratch(stream, N, call.n)
                                              : static_cast<float*>(args.dbias.data);
    Gemm fused = call;
    fused.epilogue = Epilogue::column_sums;
    fused.vector = sums;
    if (gemm(stream, fused, separate) && args.dbias.accumulate)
        launch_sum_partials(stream, args.dbias, sums, 1, N);
}

size_t linear_scratch_bytes(DType, int64_t M, int64_t N, int64_t K) {
    return std::max({gemm_workspace_bytes(M, N), gemm_workspace_bytes(M, K),
                     weight_gradient_scratch_bytes(N, K), column_sum_scratch_bytes(M, N)});
}

size_t linear_fp8_scratch_bytes(int64_t M, int64_t N, int64_t K) {
    return std::max(
        {fp8_product_bytes(M, N, K), fp8_product_bytes(M, K, N), fp8_product_bytes(N, K, M)});
}

}  // namespace train_gpt::cuda
