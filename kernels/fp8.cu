// Rounding to fp8: one pass over a tensor gives its codes, those of its transpose and its largest
// magnitude.
#include <algorithm>
#include <cstdint>

#include "device/copy.h"
#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/fp8_math.h"
#include "kernels/fp8_tile.cuh"

namespace train_gpt::cuda {

namespace {

constexpr int threads_per_block = 256;

template <class T, int width>
__global__ void __launch_bounds__(threads_per_block)
    find_largest(unsigned* largest, const T* x, int64_t n, const int32_t* row_count, int64_t cols) {
    if (row_count) n = *row_count * cols;
    const int64_t stride = int64_t{gridDim.x} * threads_per_block * width;
    float most = 0;
    for (int64_t i = (int64_t{blockIdx.x} * threads_per_block + threadIdx.x) * width; i < n;
         i += stride) {
        const Vector<T, width> own = Vector<T, width>::load(x + i);
#pragma unroll
        for (int e = 0; e < width; ++e) most = larger_magnitude(most, to_float(own.values[e]));
    }
    add_magnitude(largest, most);
}

/// The numbers of a matrix x.
template <class T>
struct Elements {
    const T* x;
    int64_t cols;

    template <int width>
    __device__ __forceinline__ void load(float (&values)[width], int64_t row, int64_t col) const {
        unpack(values, Vector<T, width>::load(x + row * cols + col));
    }
};

// --- scales --------------------------------------------------------------------------------------

constexpr int found_threads = 1024;

/// What a step's magnitudes show under the scales that it used. One block.
__global__ void __launch_bounds__(found_threads)
    find(Fp8Found* found, const float* amax, const float* scale, int64_t n, int64_t e4m3_count) {
    __shared__ int saturated, first;
    if (threadIdx.x == 0) saturated = 0, first = static_cast<int>(n);
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += found_threads) {
        const float largest = i < e4m3_count ? E4M3::largest : E5M2::largest;
        if (scale && saturates(amax[i], scale[i], largest)) atomicAdd(&saturated, 1);
        if (!(amax[i] - amax[i] == 0)) atomicMin(&first, static_cast<int>(i));
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    found->saturated = saturated;
    found->not_finite = first < n ? first : -1;
}

__device__ bool changes_nothing(const StepState* state) {
    return state->stop || state->overflow || state->skip;
}

/// The ring takes the step's magnitudes, of which an element has a thread.
__global__ void __launch_bounds__(threads_per_block)
    take_magnitudes(Fp8Update args, const StepState* state) {
    if (changes_nothing(state)) return;
    const int64_t i = int64_t{blockIdx.x} * threads_per_block + threadIdx.x;
    if (i >= args.n) return;
    const int64_t steps = args.found->steps;
    float& newest = args.history[steps % args.H * args.n + i];
    const float oldest = steps < args.H ? 0 : newest;
    newest = args.amax[i];
    const int64_t taken = steps + 1 < args.H ? steps + 1 : args.H;
    float most = 0;
#pragma unroll 8
    for (int64_t h = 0; h < taken; ++h) most = fmaxf(most, args.history[h * args.n + i]);
    if (most == 0) newest = most = oldest;
    args.scale[i] = fp8_delayed_scale(most, i < args.e4m3_count ? E4M3::largest : E5M2::largest);
}

__global__ void __launch_bounds__(found_threads)
    count_step(Fp8Update args, const StepState* state) {
    if (changes_nothing(state)) return;
    __shared__ int unset;
    if (threadIdx.x == 0) unset = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; args.scale && i < args.n; i += found_threads)
        if (args.scale[i] == 0) atomicAdd(&unset, 1);
    __syncthreads();
    if (threadIdx.x > 0) return;
    ++args.found->steps;
    if (args.scale) args.found->unset = unset;
}

}  // namespace

size_t fp8_round_scratch_bytes() { return 256; }

void fp8_round(Stream& stream, const Fp8Round& args) {
    const int64_t rows = args.x.rows(), cols = args.x.cols(), n = args.x.numel();
    auto* const largest = stream.scratch_for<unsigned>(fp8_round_scratch_bytes());
    const bool looks = !args.scaling.is_set;
    if (looks) cuda::clear(stream, largest, sizeof *largest);
    const RoundTile to{.codes = static_cast<uint8_t*>(args.codes.data),
                       .transposed = static_cast<uint8_t*>(args.transposed.data),
                       .inverse = args.inverse,
                       .scale = args.scaling.scale,
                       .largest = looks ? largest : nullptr,
                       .amax = reinterpret_cast<unsigned*>(args.scaling.amax),
                       .row_count = static_cast<const int32_t*>(args.row_count.data),
                       .rows = rows,
                       .cols = cols};
    with_element_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        const auto* x = static_cast<const T*>(args.x.data);
        const bool aligned = is_aligned(args.x.data) && is_aligned(args.codes.data);
        with_width<T>(cols, aligned, [&](auto width) {
            if (looks) {
                constexpr int blocks_per_multiprocessor = 8;
                const int64_t blocks = std::min<int64_t>(
                    ceil_div<int64_t>(n, threads_per_block * width),
                    limits_of(stream).multiprocessors * blocks_per_multiprocessor);
                find_largest<T, width>
                    <<<static_cast<unsigned>(blocks), threads_per_block, 0, stream_of(stream)>>>(
                        largest, x, n, to.row_count, cols);
                CUDA_CHECK_LAUNCH();
            }
            const Elements<T> elements{x, cols};
            if (args.format == Fp8Format::e4m3)
                launch_round_tile<E4M3, width>(stream, to, elements);
            else
                launch_round_tile<E5M2, width>(stream, to, elements);
        });
    });
}

void fp8_update(Stream& stream, const Fp8Update& args, const StepState* state) {
    find<<<1, found_threads, 0, stream_of(stream)>>>(args.found, args.amax, args.scale, args.n,
                                                     args.e4m3_count);
    CUDA_CHECK_LAUNCH();
    if (args.scale) {
        const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(args.n, threads_per_block));
        take_magnitudes<<<blocks, threads_per_block, 0, stream_of(stream)>>>(args, state);
        CUDA_CHECK_LAUNCH();
    }
    count_step<<<1, found_threads, 0, stream_of(stream)>>>(args, state);
    CUDA_CHECK_LAUNCH();
}

}  // namespace train_gpt::cuda
