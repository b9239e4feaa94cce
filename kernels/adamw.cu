#include <algorithm>
#include <cmath>

#include "device/cuda_queue.h"
#include "kernels/adamw.h"
#include "kernels/cuda_block.cuh"

namespace train_gpt::cuda {

namespace {

// One launch processes many segments. Their addresses are passed by value as kernel parameters.
// Each thread block processes one block of norm_block elements and finds its segment by its block
// number. A thread moves 16 bytes per access, 4 times.
constexpr int threads = 256;
static_assert(norm_block == 4 * 4 * threads);

// The limit on kernel parameters for sm_70 and newer, less 256 bytes for the other parameters.
constexpr size_t max_parameter_bytes = 32764 - 256;

/// As many segments as fit into the kernel parameters, and the number of each one's first thread
/// block.
template <class Segment>
struct Group {
    static constexpr int capacity =
        static_cast<int>(max_parameter_bytes / (sizeof(Segment) + sizeof(unsigned)));

    Segment segments[capacity];
    unsigned first_block[capacity];
    int count = 0;
    unsigned blocks = 0;
};

/// The elements that a thread block works on.
struct Range {
    int segment;
    int64_t first;
    int count;
};

template <class Segment>
__device__ __forceinline__ Range range_of(const Group<Segment>& group, unsigned block) {
    int segment = 0;  // the last one whose first block is not after this block
    for (int beyond = group.count; beyond - segment > 1;) {
        const int middle = (segment + beyond) / 2;
        (group.first_block[middle] <= block ? segment : beyond) = middle;
    }
    const int64_t first = int64_t{block - group.first_block[segment]} * norm_block;
    return {segment, first, static_cast<int>(min(norm_block, group.segments[segment].n - first))};
}

/// Calls launch(group) for all segments, with as many at a time as a group holds. Segments without
/// elements are skipped.
template <class Segment, class F>
void for_each_group(std::span<const Segment> segments, F&& launch) {
    Group<Segment> group;
    for (const Segment& segment : segments) {
        if (segment.n == 0) continue;
        group.segments[group.count] = segment;
        group.first_block[group.count++] = group.blocks;
        group.blocks += static_cast<unsigned>(ceil_div(segment.n, norm_block));
        if (group.count == Group<Segment>::capacity) {
            launch(group);
            group.count = 0;
            group.blocks = 0;
        }
    }
    if (group.count) launch(group);
}

/// How many of the first `count` elements are moved in packs of 4: all whole packs if the addresses
/// allow it, else none.
template <class... T>
__device__ __forceinline__ int packed(int count, const T*... addresses) {
    const bool aligned = ((reinterpret_cast<uintptr_t>(addresses) % (4 * sizeof(T)) == 0) && ...);
    return aligned ? count / 4 * 4 : 0;
}

/// One thread block per block of norm_block elements: Σ g², in fp32 over the 16 elements of a
/// thread, then in double.
__global__ void __launch_bounds__(threads)
    sum_squares(const __grid_constant__ Group<NormSegment> group) {
    __shared__ double shared[threads / warp_size];
    const Range range = range_of(group, blockIdx.x);
    const NormSegment& segment = group.segments[range.segment];
    const float* g = segment.gradient + range.first;
    const int in_packs = packed(range.count, g), thread = static_cast<int>(threadIdx.x);

    float sum = 0;
#pragma unroll
    for (int k = 0; k < norm_block / (4 * threads); ++k) {
        const int i = (k * threads + thread) * 4;
        if (i >= in_packs) continue;
        const Pack<float> pack = Pack<float>::load(g + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum += pack[j] * pack[j];
    }
    for (int i = in_packs + thread; i < range.count; i += threads) sum += g[i] * g[i];
    const double total = block_sum(static_cast<double>(sum), shared);
    if (thread == 0) segment.partials[range.first / norm_block] = total;
}

constexpr int finish_threads = 1024;

/// Σ values, the same in every thread of the block of finish_threads: thread i adds elements i, i +
/// 1024, …
__device__ double sum_in_order(const double* values, int64_t n, double* shared) {
    double sum = 0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < n; i += finish_threads) sum += values[i];
    return block_sum(sum, shared);
}

__device__ float norm_of(double sum, float scale) { return static_cast<float>(scale * sqrt(sum)); }

/// One block. Writes the norm and the multiplier. If the norm is not finite, sets stop and leaves
/// bad_segment to find_bad_segment.
__global__ void __launch_bounds__(finish_threads)
    finish(StepState* state, const double* partials, int64_t n, float scale, float clip) {
    __shared__ double shared[finish_threads / warp_size];
    const double total = sum_in_order(partials, n, shared);
    if (threadIdx.x > 0) return;
    const float norm = norm_of(total, scale);
    state->norm = norm;
    if (isfinite(norm)) {
        state->multiplier = scale * (clip > 0 && norm > clip ? clip / norm : 1.0f);
    } else {
        state->multiplier = 0;
        state->stop = 1;
    }
}

/// The number of partials of each of several consecutive segments, passed as kernel parameters.
struct Counts {
    static constexpr int capacity = 1000;

    int64_t of[capacity];
    int count = 0, first_segment = 0;
    int64_t first_partial = 0;
    bool last = false;  // no segments follow
};
static_assert(sizeof(Counts) <= max_parameter_bytes);

/// One block, which does nothing unless the optimizer has stopped and bad_segment is not yet set.
/// Goes through the segments in order until the norm of all so far is not finite. (If rounding
/// hides that, it reports the last segment.)
__global__ void __launch_bounds__(finish_threads)
    find_bad_segment(const __grid_constant__ Counts counts, StepState* state,
                     const double* partials, float scale) {
    __shared__ double shared[2][finish_threads / warp_size];
    if (!state->stop || state->bad_segment >= 0) return;
    double total = sum_in_order(partials, counts.first_partial, shared[0]);
    partials += counts.first_partial;
    for (int segment = 0; segment < counts.count; ++segment) {
        total += sum_in_order(partials, counts.of[segment], shared[(segment + 1) % 2]);
        partials += counts.of[segment];
        if (isfinite(norm_of(total, scale)) && !(counts.last && segment + 1 == counts.count))
            continue;
        if (threadIdx.x == 0) state->bad_segment = counts.first_segment + segment;
        return;
    }
}

/// The constants of one update step, including the bias corrections.
struct Constants {
    float beta1, beta2, one_minus_beta1, one_minus_beta2;
    float m_correction, v_correction;  // 1 / (1 − β₁ᵗ), 1 / (1 − β₂ᵗ)
    float learning_rate, epsilon, weight_decay;

    __device__ __forceinline__ void update(float& master, float& m, float& v, float g,
                                           float decay) const {
        m = beta1 * m + one_minus_beta1 * g;
        v = beta2 * v + one_minus_beta2 * (g * g);
        const float direction = (m * m_correction) / (sqrtf(v * v_correction) + epsilon);
        master -= learning_rate * (direction + decay * master);
    }
};

/// One thread block per block of norm_block elements. Reads gradient, m, v and master; writes m, v,
/// master and, if present, weights: 30 bytes per parameter.
__global__ void __launch_bounds__(threads)
    update_parameters(const __grid_constant__ Group<AdamWSegment> group, const Constants constants,
                      const StepState* state) {
    if (state->stop) return;
    const float multiplier = state->multiplier;
    const Range range = range_of(group, blockIdx.x);
    const AdamWSegment& segment = group.segments[range.segment];
    float *master = segment.master + range.first, *m = segment.m + range.first,
          *v = segment.v + range.first;
    const float* gradient = segment.gradient + range.first;
    __nv_bfloat16* weights =
        segment.weights ? reinterpret_cast<__nv_bfloat16*>(segment.weights) + range.first : nullptr;
    const float decay = segment.decay ? constants.weight_decay : 0.0f;
    const int in_packs = packed(range.count, master, m, v, gradient, weights),
              thread = static_cast<int>(threadIdx.x);

    for (int i = 4 * thread; i < in_packs; i += 4 * threads) {
        const Pack<float> g = Pack<float>::load_streaming(gradient + i);
        Pack<float> master_pack = Pack<float>::load_streaming(master + i),
                    m_pack = Pack<float>::load_streaming(m + i),
                    v_pack = Pack<float>::load_streaming(v + i);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            constants.update(master_pack[j], m_pack[j], v_pack[j], multiplier * g[j], decay);
        m_pack.store_streaming(m + i);
        v_pack.store_streaming(v + i);
        master_pack.store_streaming(master + i);
        if (weights) {
            __nv_bfloat162 rounded[2] = {__floats2bfloat162_rn(master_pack[0], master_pack[1]),
                                         __floats2bfloat162_rn(master_pack[2], master_pack[3])};
            uint2 bits;
            __builtin_memcpy(&bits, rounded, sizeof bits);
            *reinterpret_cast<uint2*>(weights + i) = bits;
        }
    }
    for (int i = in_packs + thread; i < range.count; i += threads) {
        constants.update(master[i], m[i], v[i], multiplier * gradient[i], decay);
        if (weights) weights[i] = from_float<__nv_bfloat16>(master[i]);
    }
}

}  // namespace

void norm_partials(Stream& stream, std::span<const NormSegment> segments) {
    for_each_group(segments, [&](const Group<NormSegment>& group) {
        sum_squares<<<group.blocks, threads, 0, stream_of(stream)>>>(group);
        CUDA_CHECK_LAUNCH();
    });
}

void finish_norm(Stream& stream, StepState* state, const double* partials,
                 std::span<const int64_t> counts, float scale, float clip) {
    int64_t total = 0;
    for (int64_t count : counts) total += count;
    finish<<<1, finish_threads, 0, stream_of(stream)>>>(state, partials, total, scale, clip);
    CUDA_CHECK_LAUNCH();

    Counts group;
    for (size_t segment = 0; segment < counts.size(); ++segment) {
        group.of[group.count++] = counts[segment];
        group.last = segment + 1 == counts.size();
        if (group.count < Counts::capacity && !group.last) continue;
        find_bad_segment<<<1, finish_threads, 0, stream_of(stream)>>>(group, state, partials,
                                                                      scale);
        CUDA_CHECK_LAUNCH();
        for (int i = 0; i < group.count; ++i) group.first_partial += group.of[i];
        group.first_segment += group.count;
        group.count = 0;
    }
}

void adamw(Stream& stream, std::span<const AdamWSegment> segments, const AdamWStep& args) {
    const double t = static_cast<double>(args.step);
    const auto correction = [&](float beta) {
        return static_cast<float>(1.0 / (1.0 - std::pow(double{beta}, t)));
    };
    const Constants constants{.beta1 = args.beta1,
                              .beta2 = args.beta2,
                              .one_minus_beta1 = 1.0f - args.beta1,
                              .one_minus_beta2 = 1.0f - args.beta2,
                              .m_correction = correction(args.beta1),
                              .v_correction = correction(args.beta2),
                              .learning_rate = args.learning_rate,
                              .epsilon = args.epsilon,
                              .weight_decay = args.weight_decay};
    for_each_group(segments, [&](const Group<AdamWSegment>& group) {
        update_parameters<<<group.blocks, threads, 0, stream_of(stream)>>>(group, constants,
                                                                           args.state);
        CUDA_CHECK_LAUNCH();
    });
}

}  // namespace train_gpt::cuda
