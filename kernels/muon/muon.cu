#include <type_traits>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/cuda_segments.cuh"
#include "kernels/exact_math.h"
#include "kernels/muon/muon.h"

namespace train_gpt::cuda {

namespace {

// Each thread block processes one block of norm_block elements (cuda_segments.cuh). A thread moves
// 16 bytes of fp32 per access, 4 times.
constexpr int threads = 256;
static_assert(norm_block == 4 * 4 * threads);

/// Four values, which a thread loads or stores at once.
template <class T>
struct alignas(4 * sizeof(T)) Four {
    using Bits = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
    T values[4];

    /// For data that no other block reads again soon: the caches evict it first.
    static __device__ __forceinline__ Four load_streaming(const T* from) {
        const Bits bits = __ldcs(reinterpret_cast<const Bits*>(from));
        Four four;
        __builtin_memcpy(&four, &bits, sizeof four);
        return four;
    }
    __device__ __forceinline__ void store_streaming(T* to) const {
        Bits bits;
        __builtin_memcpy(&bits, this, sizeof bits);
        __stcs(reinterpret_cast<Bits*>(to), bits);
    }
};

__device__ __forceinline__ bool changes_nothing(const StepState& state) {
    return state.stop || state.overflow || state.skip;
}

/// One thread block per block of norm_block elements. Reads gradient and momentum; writes momentum
/// and values: 14 bytes per element in bf16, 10 if the momentum is in bf16, too.
template <class T, class M>
__global__ void __launch_bounds__(threads)
    add_momentum(const __grid_constant__ Group<MuonSegment> group, float mu, bool nesterov,
                 const StepState* state) {
    const Range range = range_of(group, blockIdx.x);
    const MuonSegment& segment = group.segments[range.segment];
    T* const values = static_cast<T*>(segment.values) + range.first;
    const int thread = static_cast<int>(threadIdx.x);
    if (changes_nothing(*state)) {
        for (int i = thread; i < range.count; i += threads) values[i] = from_float<T>(0.0f);
        return;
    }
    const float multiplier = state->multiplier;
    M* const momentum = static_cast<M*>(segment.momentum) + range.first;
    // Integers have the same size.
    const bool is_exact = segment.sums != nullptr;
    const float* const gradient = is_exact
                                      ? reinterpret_cast<const float*>(segment.sums) + range.first
                                      : segment.gradient + range.first;
    const float grid = is_exact ? power_of_two(segment.exponents[range.first / norm_block]) : 1.0f;
    const float of_momentum = nesterov ? mu : 1.0f, of_gradient = nesterov ? 1.0f : 0.0f;
    /// Changes the momentum; returns the direction.
    const auto step = [&](M& kept, float read) {
        const float g =
            multiplier * (is_exact ? static_cast<float>(__float_as_int(read)) * grid : read);
        const float m = mu * to_float(kept) + g;
        kept = from_float<M>(m);
        return of_gradient * g + of_momentum * m;
    };
    const int in_packs = packed(range.count, momentum, gradient, values);
    for (int i = 4 * thread; i < in_packs; i += 4 * threads) {
        const Pack<float> g = Pack<float>::load_streaming(gradient + i);
        Four<M> m = Four<M>::load_streaming(momentum + i);
        Four<T> out;
#pragma unroll
        for (int j = 0; j < 4; ++j) out.values[j] = from_float<T>(step(m.values[j], g[j]));
        m.store_streaming(momentum + i);
        *reinterpret_cast<Four<T>*>(values + i) = out;
    }
    for (int i = in_packs + thread; i < range.count; i += threads)
        values[i] = from_float<T>(step(momentum[i], gradient[i]));
}

/// The same for the update. Reads values and master; writes master and, if present, weights: 12
/// bytes per element in bf16.
template <class T>
__global__ void __launch_bounds__(threads)
    update(const __grid_constant__ Group<MuonSegment> group, float rate, float weight_decay,
           bool cautious, const StepState* state) {
    if (changes_nothing(*state)) return;
    const Range range = range_of(group, blockIdx.x);
    const MuonSegment& segment = group.segments[range.segment];
    const T* const values = static_cast<const T*>(segment.values) + range.first;
    float* const master = segment.master + range.first;
    __nv_bfloat16* const weights =
        segment.weights ? reinterpret_cast<__nv_bfloat16*>(segment.weights) + range.first : nullptr;
    const float decay = segment.decay ? weight_decay : 0.0f, scale = segment.scale;
    const auto step = [&](float& theta, T value) {
        const float v = to_float(value), of_element = cautious && v * theta < 0 ? 0.0f : decay;
        theta -= rate * (scale * v + of_element * theta);
    };
    const int in_packs = packed(range.count, master, values, weights),
              thread = static_cast<int>(threadIdx.x);
    for (int i = 4 * thread; i < in_packs; i += 4 * threads) {
        const Four<T> direction = *reinterpret_cast<const Four<T>*>(values + i);
        Pack<float> theta = Pack<float>::load_streaming(master + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) step(theta[j], direction.values[j]);
        theta.store_streaming(master + i);
        if (weights) {
            Four<__nv_bfloat16> rounded;
#pragma unroll
            for (int j = 0; j < 4; ++j) rounded.values[j] = from_float<__nv_bfloat16>(theta[j]);
            *reinterpret_cast<Four<__nv_bfloat16>*>(weights + i) = rounded;
        }
    }
    for (int i = in_packs + thread; i < range.count; i += threads) {
        step(master[i], values[i]);
        if (weights) weights[i] = from_float<__nv_bfloat16>(master[i]);
    }
}

}  // namespace

void muon_momentum(Stream& stream, std::span<const MuonSegment> segments, const MuonStep& args) {
    with_element_type(args.dtype, [&](auto type) {
        using T = decltype(type);
        for_each_group(segments, [&](const Group<MuonSegment>& group) {
            const auto kernel = args.momentum_dtype == DType::bf16 ? add_momentum<T, __nv_bfloat16>
                                                                   : add_momentum<T, float>;
            kernel<<<group.blocks, threads, 0, stream_of(stream)>>>(group, args.momentum,
                                                                    args.nesterov, args.state);
            CUDA_CHECK_LAUNCH();
        });
    });
}

void muon_update(Stream& stream, std::span<const MuonSegment> segments, const MuonStep& args) {
    with_element_type(args.dtype, [&](auto type) {
        using T = decltype(type);
        for_each_group(segments, [&](const Group<MuonSegment>& group) {
            update<T><<<group.blocks, threads, 0, stream_of(stream)>>>(
                group, args.learning_rate, args.weight_decay, args.cautious_decay, args.state);
            CUDA_CHECK_LAUNCH();
        });
    });
}

}  // namespace train_gpt::cuda
