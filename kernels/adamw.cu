#include <algorithm>
#include <cmath>
#include <type_traits>

#include "base/random.h"
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
    float *master = segment.master + range.first, *m = static_cast<float*>(segment.m) + range.first,
          *v = static_cast<float*>(segment.v) + range.first;
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

// ---- Moments in 16 or 8 bits --------------------------------------------------------------------

/// Four elements, which a thread loads or stores at once if all addresses allow it.
template <class T>
struct alignas(4 * sizeof(T)) Four {
    T values[4];

    /// The first `count` of them; the others are 0.
    static __device__ __forceinline__ Four load(const T* from, int count, bool at_once) {
        if (at_once && count >= 4) return *reinterpret_cast<const Four*>(from);
        Four four;
#pragma unroll
        for (int j = 0; j < 4; ++j) four.values[j] = j < count ? from[j] : T();
        return four;
    }
    __device__ __forceinline__ void store(T* to, int count, bool at_once) const {
        if (at_once && count >= 4) {
            *reinterpret_cast<Four*>(to) = *this;
            return;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (j < count) to[j] = values[j];
    }
};

// A warp has a block of code_block elements; a lane has two times four consecutive ones.
constexpr int fours = static_cast<int>(code_block) / (4 * warp_size);
static_assert(fours == 2 && norm_block % code_block == 0);
using Lane = float[fours][4];

template <Coding coding>
using Map = DynamicMap<coding, uint8_t>;
__device__ const Map<Coding::signs> map_of_signs = {};
__device__ const Map<Coding::roots> map_of_roots = {};

/// A map in shared memory, where lanes read different entries at once.
template <Coding coding>
struct SharedMap {
    alignas(16) unsigned char bytes[sizeof(Map<coding>)];

    __device__ __forceinline__ const Map<coding>& map() const {
        return *reinterpret_cast<const Map<coding>*>(bytes);
    }
    __device__ __forceinline__ void fill(const Map<coding>& from) {
        static_assert(sizeof from % sizeof(unsigned) == 0);
        for (unsigned i = threadIdx.x; i < sizeof from / sizeof(unsigned); i += threads)
            reinterpret_cast<unsigned*>(bytes)[i] = reinterpret_cast<const unsigned*>(&from)[i];
    }
};

template <Coding coding>
__device__ __forceinline__ float decoded(const Map<coding>& map, uint8_t code, float scale) {
    if (coding == Coding::roots) return map.values[code] * scale;
    const float value = map.values[code & 0x7f] * scale;
    return code > 0x7f ? -value : value;
}

/// inverse: of the block's scale; 0 if it is 0.
template <Coding coding>
__device__ __forceinline__ uint8_t encoded(const Map<coding>& map, float value, float inverse) {
    const float x = fmaxf(fminf(fabsf(value) * inverse, 1.0f), Map<coding>::lowest);
    const int below = map.codes[(__float_as_uint(x) >> 16) - Map<coding>::first_key],
              code = below + (x > map.bounds[below] ? 1 : 0);
    if (inverse == 0 || value == 0) return 0;
    return static_cast<uint8_t>(coding == Coding::signs && value < 0 && code > 0 ? code | 0x80
                                                                                 : code);
}

/// The largest absolute value of a warp's, in all lanes; 0 if it is too small for a scale.
__device__ __forceinline__ float scale_of(const Lane& values) {
    float largest = 0;
#pragma unroll
    for (int h = 0; h < fours; ++h)
#pragma unroll
        for (int j = 0; j < 4; ++j) largest = fmaxf(largest, fabsf(values[h][j]));
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    return largest >= smallest_scale ? largest : 0.0f;
}

/// The same update as update_parameters, of moments in bf16 or as codes: 22 or 18 bytes per
/// parameter. A warp updates a block of code_block elements in registers.
template <bool cautious, bool has_codes>
__global__ void __launch_bounds__(threads, 3)
    update_small_moments(const __grid_constant__ Group<AdamWSegment> group,
                         const Constants constants, const StepState* state, uint64_t seed,
                         int64_t step) {
    using T = std::conditional_t<has_codes, uint8_t, __nv_bfloat16>;
    __shared__ SharedMap<Coding::signs> shared_signs;
    __shared__ SharedMap<Coding::roots> shared_roots;
    if (state->stop || state->overflow || state->skip) return;
    if (has_codes) {
        shared_signs.fill(map_of_signs);
        shared_roots.fill(map_of_roots);
        __syncthreads();
    }
    const auto& signs = shared_signs.map();
    const auto& roots = shared_roots.map();
    const float multiplier = state->multiplier;
    const Range range = range_of(group, blockIdx.x);
    const AdamWSegment& segment = group.segments[range.segment];
    float* const all_masters = segment.master + range.first;
    T *const all_m = static_cast<T*>(segment.m) + range.first, *const all_v =
                                                                   static_cast<T*>(segment.v) +
                                                                   range.first;
    const bool is_exact = segment.sums != nullptr;
    const float* const all_gradients =
        is_exact ? reinterpret_cast<const float*>(segment.sums) + range.first
                 : segment.gradient + range.first;
    const float grid = is_exact ? power_of_two(segment.exponents[range.first / norm_block]) : 1.0f;
    __nv_bfloat16* const all_weights =
        segment.weights ? reinterpret_cast<__nv_bfloat16*>(segment.weights) + range.first : nullptr;
    const float decay = segment.decay ? constants.weight_decay : 0.0f;
    const bool at_once = packed(4, all_masters, all_m, all_v, all_gradients, all_weights) == 4;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;

    for (int first = static_cast<int>(threadIdx.x) / warp_size * static_cast<int>(code_block);
         first < range.count; first += threads / warp_size * static_cast<int>(code_block)) {
        const int64_t block = (range.first + first) / code_block;
        float m_scale = has_codes ? segment.m_scales[block] : 0,
              v_scale = has_codes ? segment.v_scales[block] : 0;
        Lane m, v;
#pragma unroll
        for (int h = 0; h < fours; ++h) {
            const int i = first + 4 * (h * warp_size + lane), count = range.count - i;
            const auto g = Four<float>::load(all_gradients + i, count, at_once);
            const auto m_of = Four<T>::load(all_m + i, count, at_once),
                       v_of = Four<T>::load(all_v + i, count, at_once);
            auto master = Four<float>::load(all_masters + i, count, at_once);
            Four<__nv_bfloat16> weights;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if constexpr (has_codes) {
                    const float root = decoded(roots, v_of.values[j], v_scale);
                    m[h][j] = decoded(signs, m_of.values[j], m_scale);
                    v[h][j] = root * root;
                } else {
                    m[h][j] = to_float(m_of.values[j]);
                    v[h][j] = to_float(v_of.values[j]);
                }
                const float read = g.values[j];
                constants.update<cautious>(
                    master.values[j], m[h][j], v[h][j],
                    multiplier *
                        (is_exact ? static_cast<float>(__float_as_int(read)) * grid : read),
                    decay);
                weights.values[j] = from_float<__nv_bfloat16>(master.values[j]);
            }
            master.store(all_masters + i, count, at_once);
            if (all_weights) weights.store(all_weights + i, count, at_once);
        }
        if constexpr (has_codes) {
            const float new_m_scale = scale_of(m);
#pragma unroll
            for (int h = 0; h < fours; ++h)
#pragma unroll
                for (int j = 0; j < 4; ++j) v[h][j] = fminf(sqrtf(v[h][j]), largest_root);
            const float new_v_scale = scale_of(v);
            m_scale = new_m_scale > 0 ? 1 / new_m_scale : 0.0f;
            v_scale = new_v_scale > 0 ? 1 / new_v_scale : 0.0f;
            __syncwarp();  // all lanes have read the scales
            if (lane == 0) segment.m_scales[block] = new_m_scale;
            if (lane == 0) segment.v_scales[block] = new_v_scale;
        }
#pragma unroll
        for (int h = 0; h < fours; ++h) {
            const int i = first + 4 * (h * warp_size + lane), count = range.count - i;
            Four<T> m_of, v_of;
            if constexpr (has_codes) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    m_of.values[j] = encoded(signs, m[h][j], m_scale);
                    v_of.values[j] = encoded(roots, v[h][j], v_scale);
                }
            } else {
                const RandomStream random(seed, RandomPurpose::rounding, segment.tensor,
                                          static_cast<uint64_t>(step));
                const uint32x4 words =
                    random.block(static_cast<uint64_t>(segment.first + range.first + i) / 4);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    m_of.values[j] = from_float<T>(m[h][j]);
                    v_of.values[j] = __ushort_as_bfloat16(
                        rounded_at_random(v[h][j], words[static_cast<size_t>(j)]));
                }
            }
            m_of.store(all_m + i, count, at_once);
            v_of.store(all_v + i, count, at_once);
        }
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
        if (args.moments != DType::fp32) {
            const bool has_codes = args.moments == DType::uint8;
            const auto kernel = args.cautious_decay ? has_codes ? update_small_moments<true, true>
                                                                : update_small_moments<true, false>
                                : has_codes ? update_small_moments<false, true>
                                                    : update_small_moments<false, false>;
            kernel<<<group.blocks, threads, 0, stream_of(stream)>>>(group, constants, args.state,
                                                                    args.seed, args.step);
            CUDA_CHECK_LAUNCH();
            return;
        }
        const auto kernel =
            args.cautious_decay ? update_parameters<true> : update_parameters<false>;
        kernel<<<group.blocks, threads, 0, stream_of(stream)>>>(group, constants, args.state);
        CUDA_CHECK_LAUNCH();
    });
}

void load_adamw(const Device& device) {
    // A module is loaded when something of it is first used.
    CUDA_CHECK(cudaSetDevice(device.index));
    void* map = nullptr;
    CUDA_CHECK(cudaGetSymbolAddress(&map, map_of_signs));
}

}  // namespace train_gpt::cuda
