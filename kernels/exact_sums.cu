#include <algorithm>
#include <span>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/cuda_exact.cuh"
#include "kernels/cuda_segments.cuh"
#include "kernels/exact_math.h"
#include "kernels/exact_sums.h"

namespace train_gpt::cuda {

namespace {

// Thread blocks process blocks of norm_block elements (cuda_segments.cuh), 16 for each thread.
constexpr int threads = 256;
static_assert(norm_block == 4 * 4 * threads);

/// The largest value in a thread block, the same in every thread. `shared` holds one for each warp.
__device__ __forceinline__ uint32_t block_max(uint32_t value, uint32_t* shared) {
    value = __reduce_max_sync(0xffffffffu, value);
    if (threadIdx.x % warp_size == 0) shared[threadIdx.x / warp_size] = value;
    __syncthreads();
    uint32_t largest = 0;
    for (unsigned warp = 0; warp < blockDim.x / warp_size; ++warp)
        largest = max(largest, shared[warp]);
    return largest;
}

__device__ __forceinline__ void atomic_add(int64_t* to, int64_t value) {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ void atomic_min(int64_t* to, int64_t value) {
    atomicMin(reinterpret_cast<long long*>(to), static_cast<long long>(value));
}

/// Reads a micro-batch's gradient once; reads sums, if they are added to, and writes them.
__global__ void __launch_bounds__(threads)
    round_gradients(const __grid_constant__ Group<ExactSegment> group) {
    __shared__ uint32_t shared[threads / warp_size];
    const Range range = range_of(group, blockIdx.x);
    const ExactSegment& segment = group.segments[range.segment];
    const int64_t block = range.first / norm_block;
    const float* g = segment.gradient + range.first;
    int32_t* sums = segment.sums + range.first;
    const float inverse = power_of_two(-segment.exponents[block]);
    const bool accumulate = segment.accumulate;
    const int in_packs = packed(range.count, g, sums), thread = static_cast<int>(threadIdx.x);

    uint32_t largest = 0, lost = 0;
#pragma unroll
    for (int k = 0; k < norm_block / (4 * threads); ++k) {
        const int i = (k * threads + thread) * 4;
        if (i >= in_packs) continue;
        const Pack<float> in = Pack<float>::load(g + i);
        Pack<int32_t> out = {};
        if (accumulate) out = Pack<int32_t>::load(sums + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int32_t q = rounded_on_device(in[j], inverse);
            largest = max(largest, magnitude_bits(in[j]));
            lost += q == 0 && in[j] != 0;
            out[j] = wrapped_sum(out[j], q);
        }
        out.store(sums + i);
    }
    for (int i = in_packs + thread; i < range.count; i += threads) {
        const float x = g[i];
        const int32_t q = rounded_on_device(x, inverse);
        largest = max(largest, magnitude_bits(x));
        lost += q == 0 && x != 0;
        sums[i] = wrapped_sum(accumulate ? sums[i] : 0, q);
    }
    lost = __reduce_add_sync(0xffffffffu, lost);
    if (thread % warp_size == 0 && lost > 0) atomic_add(segment.lost, lost);
    largest = block_max(largest, shared);
    if (thread > 0) return;
    segment.maxima[block] += grid_units(__uint_as_float(largest), inverse);
    if (largest < infinity_bits) return;
    atomic_add(segment.not_finite, 1);
    atomic_min(segment.first_not_finite, segment.number);
}

__global__ void __launch_bounds__(threads)
    find_maxima(const __grid_constant__ Group<LargestSegment> group) {
    __shared__ uint32_t shared[threads / warp_size];
    const Range range = range_of(group, blockIdx.x);
    const LargestSegment& segment = group.segments[range.segment];
    const float* g = segment.gradient + range.first;
    uint32_t largest = 0;
    for (int i = static_cast<int>(threadIdx.x); i < range.count; i += threads)
        largest = max(largest, magnitude_bits(g[i]));
    largest = block_max(largest, shared);
    float& so_far = segment.largest[range.first / norm_block];
    if (threadIdx.x == 0) so_far = fmaxf(so_far, __uint_as_float(largest));
}

__global__ void __launch_bounds__(threads) add_largest(const LargestRow row) {
    const uint32_t bits = *row.largest;
    const int64_t units = grid_units(__uint_as_float(bits), power_of_two(-*row.exponent));
    const int64_t all = int64_t{gridDim.x} * threads;
    const int64_t first = int64_t{blockIdx.x} * threads + threadIdx.x;
    for (int64_t b = first; b < row.blocks; b += all) row.maxima[b] += units;
    if (first != 0 || bits < infinity_bits) return;
    *row.not_finite += 1;
    atomic_min(row.first_not_finite, row.number);
}

__global__ void __launch_bounds__(threads)
    add(int32_t* sums, const int32_t* added, int64_t n, bool accumulate) {
    const int64_t all = int64_t{gridDim.x} * threads;
    for (int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x; i < n; i += all)
        sums[i] = wrapped_sum(accumulate ? sums[i] : 0, added[i]);
}

/// Tensors, passed as kernel parameters.
struct Tensors {
    static constexpr int capacity = static_cast<int>(max_parameter_bytes / sizeof(TensorGrids)) - 1;

    TensorGrids of[capacity];
    int count = 0;
    int first = 0;  // the number of the first one
};
static_assert(sizeof(Tensors) <= max_parameter_bytes);

/// Calls launch(tensors) for all tensors, with as many at a time as fit.
template <class F>
void for_each_group_of_tensors(std::span<const TensorGrids> all, F&& launch) {
    Tensors tensors;
    for (size_t t = 0; t < all.size(); ++t) {
        tensors.of[tensors.count++] = all[t];
        if (tensors.count < Tensors::capacity && t + 1 < all.size()) continue;
        launch(tensors);
        tensors.first += tensors.count;
        tensors.count = 0;
    }
}

/// Exponents are compared as unsigned numbers, in which no_exponent is 0.
__device__ __forceinline__ uint32_t ordered(int32_t e) {
    return static_cast<uint32_t>(e) ^ 1u << 31;
}
__device__ __forceinline__ int32_t exponent_of_order(uint32_t order) {
    return static_cast<int32_t>(order ^ 1u << 31);
}
static_assert(no_exponent == INT32_MIN);

/// The coarsest of these grids, the same in every thread.
__device__ int32_t coarsest(const int32_t* exponents, int64_t n, uint32_t* shared) {
    uint32_t largest = 0;
    for (int64_t b = threadIdx.x; b < n; b += threads)
        largest = max(largest, ordered(exponents[b]));
    return exponent_of_order(block_max(largest, shared));
}

/// One thread block for each tensor.
__global__ void __launch_bounds__(threads)
    choose_first(int32_t* exponents, const float* largest, const __grid_constant__ Tensors tensors,
                 int64_t contributions, int headroom) {
    __shared__ uint32_t shared[threads / warp_size];
    const TensorGrids& tensor = tensors.of[blockIdx.x];
    int32_t* const own = exponents + tensor.first;
    for (int64_t b = threadIdx.x; b < tensor.blocks; b += threads)
        own[b] = first_exponent(largest[tensor.first + b], contributions, headroom);
    __syncthreads();
    const int32_t most = coarsest(own, tensor.blocks, shared);
    for (int64_t b = threadIdx.x; b < tensor.blocks; b += threads)
        own[b] = tensor.one_grid || own[b] == no_exponent ? most : grid_of_block(own[b], most);
}

/// One thread block: blocks without a grid take the coarsest.
__global__ void __launch_bounds__(threads) fill_missing(int32_t* exponents, int64_t n) {
    __shared__ uint32_t shared[threads / warp_size];
    const int32_t most = coarsest(exponents, n, shared);
    for (int64_t b = threadIdx.x; b < n; b += threads)
        if (exponents[b] == no_exponent) exponents[b] = most == no_exponent ? 0 : most;
}

__global__ void __launch_bounds__(threads)
    mark_overflow(int32_t* overflow, const int64_t* maxima, int64_t blocks) {
    const int64_t b = int64_t{blockIdx.x} * threads + threadIdx.x;
    if (b < blocks && maxima[b] >= int_limit) *overflow = 1;
}

__global__ void __launch_bounds__(threads)
    choose_next(int32_t* exponents, const int64_t* maxima, const __grid_constant__ Tensors tensors,
                int headroom, const int32_t* overflow, const int32_t* stale) {
    if (*stale != 0) return;
    __shared__ uint32_t shared[threads / warp_size];
    const TensorGrids& tensor = tensors.of[blockIdx.x];
    const bool overflows = *overflow != 0;
    // With one grid, of the tensor's largest S only the number of bits matters.
    uint32_t bits = 0;
    if (tensor.one_grid) {
        for (int64_t b = threadIdx.x; b < tensor.blocks; b += threads)
            bits = max(bits, 64u - static_cast<uint32_t>(__clzll(maxima[tensor.first + b])));
        bits = block_max(bits, shared);
    }
    int32_t* const own = exponents + tensor.first;
    for (int64_t b = threadIdx.x; b < tensor.blocks; b += threads) {
        const int64_t units = !tensor.one_grid ? maxima[tensor.first + b]
                              : bits == 0      ? 0
                                               : int64_t{1} << (bits - 1);
        own[b] = next_exponent(own[b], units, headroom, overflows);
    }
    __syncthreads();
    const int32_t most = coarsest(own, tensor.blocks, shared);
    for (int64_t b = threadIdx.x; b < tensor.blocks; b += threads)
        own[b] = grid_of_block(own[b], most);
}

__global__ void __launch_bounds__(threads) find_scales(int32_t* scales, const int32_t* exponents,
                                                       const __grid_constant__ Tensors tensors) {
    __shared__ uint32_t shared[threads / warp_size];
    const TensorGrids& tensor = tensors.of[blockIdx.x];
    const int32_t most = coarsest(exponents + tensor.first, tensor.blocks, shared);
    if (threadIdx.x == 0)
        scales[tensors.first + static_cast<int>(blockIdx.x)] =
            norm_scale(max(most, min_exponent), tensor.blocks);
}

__global__ void __launch_bounds__(threads)
    add_squares(const __grid_constant__ Group<ExactNormSegment> group) {
    __shared__ double shared[threads / warp_size];
    const Range range = range_of(group, blockIdx.x);
    const ExactNormSegment& segment = group.segments[range.segment];
    const int32_t* q = segment.sums + range.first;
    const int in_packs = packed(range.count, q), thread = static_cast<int>(threadIdx.x);
    float sum = 0;
#pragma unroll
    for (int k = 0; k < norm_block / (4 * threads); ++k) {
        const int i = (k * threads + thread) * 4;
        if (i >= in_packs) continue;
        const Pack<int32_t> pack = Pack<int32_t>::load(q + i);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            sum += static_cast<float>(pack[j]) * static_cast<float>(pack[j]);
    }
    for (int i = in_packs + thread; i < range.count; i += threads)
        sum += static_cast<float>(q[i]) * static_cast<float>(q[i]);
    const double squares = block_sum(static_cast<double>(sum), shared);
    if (thread == 0)
        atomic_add(segment.total, norm_units(squares, segment.exponents[range.first / norm_block],
                                             *segment.scale));
}

__global__ void __launch_bounds__(threads)
    to_doubles(double* sums, const int64_t* totals, const int32_t* scales,
               const int64_t* not_finite, int64_t n) {
    const int64_t t = int64_t{blockIdx.x} * threads + threadIdx.x;
    if (t >= n) return;
    sums[t] = not_finite[t] > 0 ? __longlong_as_double(0x7ff8000000000000)
                                : static_cast<double>(totals[t]) * double_power_of_two(scales[t]);
}

/// Blocks of a kernel whose threads take elements in turns.
unsigned blocks_for(const Stream& stream, int64_t n) {
    constexpr int64_t of_multiprocessor = 8;
    return static_cast<unsigned>(std::min(ceil_div(n, int64_t{threads}),
                                          of_multiprocessor * limits_of(stream).multiprocessors));
}

}  // namespace

void round_and_add(Stream& stream, std::span<const ExactSegment> segments) {
    for_each_group(segments, [&](const Group<ExactSegment>& group) {
        round_gradients<<<group.blocks, threads, 0, stream_of(stream)>>>(group);
        CUDA_CHECK_LAUNCH();
    });
}

void count_largest(Stream& stream, const LargestRow& row) {
    add_largest<<<blocks_for(stream, row.blocks), threads, 0, stream_of(stream)>>>(row);
    CUDA_CHECK_LAUNCH();
    CUDA_CHECK(cudaMemsetAsync(row.largest, 0, sizeof *row.largest, stream_of(stream)));
}

void add_integers(Stream& stream, int32_t* sums, const int32_t* added, int64_t n, bool accumulate) {
    if (n == 0) return;
    add<<<blocks_for(stream, n), threads, 0, stream_of(stream)>>>(sums, added, n, accumulate);
    CUDA_CHECK_LAUNCH();
}

void block_maxima(Stream& stream, std::span<const LargestSegment> segments) {
    for_each_group(segments, [&](const Group<LargestSegment>& group) {
        find_maxima<<<group.blocks, threads, 0, stream_of(stream)>>>(group);
        CUDA_CHECK_LAUNCH();
    });
}

void first_grids(Stream& stream, int32_t* exponents, const float* largest,
                 std::span<const TensorGrids> tensors, int64_t contributions) {
    int64_t blocks = 0;
    for_each_group_of_tensors(tensors, [&](const Tensors& some) {
        choose_first<<<static_cast<unsigned>(some.count), threads, 0, stream_of(stream)>>>(
            exponents, largest, some, contributions, headroom_bits(contributions));
        CUDA_CHECK_LAUNCH();
    });
    for (const TensorGrids& tensor : tensors)
        blocks = std::max(blocks, tensor.first + tensor.blocks);
    fill_missing<<<1, threads, 0, stream_of(stream)>>>(exponents, blocks);
    CUDA_CHECK_LAUNCH();
}

void find_overflow(Stream& stream, int32_t* overflow, const int64_t* maxima, int64_t blocks) {
    if (blocks == 0) return;
    mark_overflow<<<static_cast<unsigned>(ceil_div(blocks, int64_t{threads})), threads, 0,
                    stream_of(stream)>>>(overflow, maxima, blocks);
    CUDA_CHECK_LAUNCH();
}

void update_grids(Stream& stream, const GridUpdate& args) {
    for_each_group_of_tensors(args.tensors, [&](const Tensors& some) {
        choose_next<<<static_cast<unsigned>(some.count), threads, 0, stream_of(stream)>>>(
            args.exponents, args.maxima, some, headroom_bits(args.contributions), args.overflow,
            args.stale);
        CUDA_CHECK_LAUNCH();
    });
}

void norm_scales(Stream& stream, int32_t* scales, const int32_t* exponents,
                 std::span<const TensorGrids> tensors) {
    for_each_group_of_tensors(tensors, [&](const Tensors& some) {
        find_scales<<<static_cast<unsigned>(some.count), threads, 0, stream_of(stream)>>>(
            scales, exponents, some);
        CUDA_CHECK_LAUNCH();
    });
}

void exact_norm(Stream& stream, std::span<const ExactNormSegment> segments) {
    for_each_group(segments, [&](const Group<ExactNormSegment>& group) {
        add_squares<<<group.blocks, threads, 0, stream_of(stream)>>>(group);
        CUDA_CHECK_LAUNCH();
    });
}

void norm_sums(Stream& stream, double* sums, const int64_t* totals, const int32_t* scales,
               const int64_t* not_finite, int64_t tensors) {
    if (tensors == 0) return;
    to_doubles<<<static_cast<unsigned>(ceil_div(tensors, int64_t{threads})), threads, 0,
                 stream_of(stream)>>>(sums, totals, scales, not_finite, tensors);
    CUDA_CHECK_LAUNCH();
}

}  // namespace train_gpt::cuda
