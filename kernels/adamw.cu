#include <algorithm>
#include <cmath>

#include "device/cuda_queue.h"
#include "kernels/adamw.h"
#include "kernels/cuda_block.cuh"
#include "kernels/cuda_segments.cuh"
#include "kernels/exact_math.h"

namespace train_gpt::cuda {

namespace {

// Each thread block processes one block of norm_block elements (cuda_segments.cuh). A thread moves
// 16 bytes per access, 4 times.
constexpr int threads = 256;
static_assert(norm_block == 4 * 4 * threads);

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

/// Where the partials of several consecutive tensors begin, passed as kernel parameters; one more
/// entry says where the last ones end.
struct Starts {
    static constexpr int capacity = 1000;

    int64_t of[capacity + 1];
    int count = 0;
};
static_assert(sizeof(Starts) <= max_parameter_bytes);

/// One thread block per tensor.
__global__ void __launch_bounds__(finish_threads)
    sum_tensors(double* sums, const double* partials, const __grid_constant__ Starts starts) {
    __shared__ double shared[finish_threads / warp_size];
    const int64_t first = starts.of[blockIdx.x], end = starts.of[blockIdx.x + 1];
    const double sum = sum_in_order(partials + first, end - first, shared);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(threads)
    sum_rows(double* out, const double* in, int64_t rows, int64_t n) {
    const int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x;
    if (i >= n) return;
    double sum = 0;
#pragma unroll 8
    for (int64_t r = 0; r < rows; ++r) sum += in[r * n + i];
    out[i] = sum;
}

/// One block. Writes the norm and the multiplier, or if the norm is not finite, stop and
/// bad_segment. (If rounding hides the bad sum, that is the last one.)
__global__ void __launch_bounds__(finish_threads)
    finish(StepState* state, const double* sums, int64_t n, float scale, float clip) {
    __shared__ double shared[finish_threads / warp_size];
    const double total = sum_in_order(sums, n, shared);
    if (threadIdx.x > 0) return;
    const float norm = norm_of(total, scale);
    state->norm = norm;
    if (isfinite(norm)) {
        state->multiplier = scale * (clip > 0 && norm > clip ? clip / norm : 1.0f);
        return;
    }
    state->multiplier = 0;
    state->stop = 1;
    if (state->bad_segment >= 0) return;
    int64_t bad = 0;
    for (double so_far = sums[0]; bad + 1 < n && isfinite(norm_of(so_far, scale));)
        so_far += sums[++bad];
    state->bad_segment = static_cast<int32_t>(bad);
}

/// The constants of one update step, including the bias corrections.
struct Constants {
    float beta1, beta2, one_minus_beta1, one_minus_beta2;
    float m_correction, v_correction;  // 1 / (1 − β₁ᵗ), 1 / (1 − β₂ᵗ)
    float learning_rate, epsilon, weight_decay;

    template <bool cautious>
    __device__ __forceinline__ void update(float& master, float& m, float& v, float g,
                                           float decay) const {
        m = beta1 * m + one_minus_beta1 * g;
        v = beta2 * v + one_minus_beta2 * (g * g);
        const float direction = (m * m_correction) / (sqrtf(v * v_correction) + epsilon);
        const float of_element = cautious && direction * master < 0 ? 0.0f : decay;
        master -= learning_rate * (direction + of_element * master);
    }
};

/// One thread block per block of norm_block elements. Reads gradient, m, v and master; writes m, v,
/// master and, if present, weights: 30 bytes per parameter.
template <bool cautious>
__global__ void __launch_bounds__(threads)
    update_parameters(const __grid_constant__ Group<AdamWSegment> group, const Constants constants,
                      const StepState* state) {
    if (state->stop || state->overflow || state->skip) return;
    const float multiplier = state->multiplier;
    const Range range = range_of(group, blockIdx.x);
    const AdamWSegment& segment = group.segments[range.segment];
    float *master = segment.master + range.first, *m = segment.m + range.first,
          *v = segment.v + range.first;
    // Integers have the same size.
    const bool is_exact = segment.sums != nullptr;
    const float* gradient = is_exact ? reinterpret_cast<const float*>(segment.sums) + range.first
                                     : segment.gradient + range.first;
    const float grid = is_exact ? power_of_two(segment.exponents[range.first / norm_block]) : 1.0f;
    const auto gradient_of = [&](float read) {
        return is_exact ? static_cast<float>(__float_as_int(read)) * grid : read;
    };
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
            constants.update<cautious>(master_pack[j], m_pack[j], v_pack[j],
                                       multiplier * gradient_of(g[j]), decay);
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
        constants.update<cautious>(master[i], m[i], v[i], multiplier * gradient_of(gradient[i]),
                                   decay);
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

void add_partials(Stream& stream, double* sums, const double* partials,
                  std::span<const int64_t> counts) {
    Starts starts;
    int64_t end = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
        starts.of[starts.count++] = end;
        end += counts[i];
        if (starts.count < Starts::capacity && i + 1 < counts.size()) continue;
        starts.of[starts.count] = end;
        sum_tensors<<<static_cast<unsigned>(starts.count), finish_threads, 0, stream_of(stream)>>>(
            sums, partials, starts);
        CUDA_CHECK_LAUNCH();
        sums += starts.count;
        starts.count = 0;
    }
}

void add_rows(Stream& stream, double* out, const double* in, int64_t rows, int64_t n) {
    sum_rows<<<static_cast<unsigned>(ceil_div(n, int64_t{threads})), threads, 0,
               stream_of(stream)>>>(out, in, rows, n);
    CUDA_CHECK_LAUNCH();
}

void finish_norm(Stream& stream, StepState* state, const double* sums, int64_t n, float scale,
                 float clip) {
    finish<<<1, finish_threads, 0, stream_of(stream)>>>(state, sums, n, scale, clip);
    CUDA_CHECK_LAUNCH();
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
        const auto kernel =
            args.cautious_decay ? update_parameters<true> : update_parameters<false>;
        kernel<<<group.blocks, threads, 0, stream_of(stream)>>>(group, constants, args.state);
        CUDA_CHECK_LAUNCH();
    });
}

}  // namespace train_gpt::cuda
