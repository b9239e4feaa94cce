#include <algorithm>

#include "device/cuda_queue.h"
#include "kernels/convert.h"
#include "kernels/cuda_block.cuh"

namespace train_gpt::cuda {

namespace {

// Threads take packs of 8 elements, the size of a bf16 pack, in a grid-stride loop. There are
// enough blocks to fill the GPU.
constexpr int threads = 256, elements_per_pack = Pack<__nv_bfloat16>::size;
constexpr int blocks_per_multiprocessor = 8;

/// to[i] = from[i] in To's precision, plus to[i] if `accumulate`. Addresses are multiples of 16
/// bytes (parts of planned buffers start at multiples of norm_block); the tail is converted one
/// element at a time.
template <class To, class From, bool accumulate>
__global__ void __launch_bounds__(threads) convert(To* to, const From* from, int64_t n) {
    const int64_t thread = int64_t{blockIdx.x} * threads + threadIdx.x,
                  all = int64_t{gridDim.x} * threads;
    const int64_t packs = n / elements_per_pack;
    for (int64_t pack = thread; pack < packs; pack += all) {
        float values[elements_per_pack];
        constexpr int from_size = Pack<From>::size, to_size = Pack<To>::size;
#pragma unroll
        for (int k = 0; k < elements_per_pack; k += from_size) {
            const Pack<From> part = Pack<From>::load(from + pack * elements_per_pack + k);
#pragma unroll
            for (int e = 0; e < from_size; ++e) values[k + e] = to_float(part[e]);
        }
#pragma unroll
        for (int k = 0; k < elements_per_pack; k += to_size) {
            To* const at = to + pack * elements_per_pack + k;
            Pack<To> part;
            if constexpr (accumulate) part = Pack<To>::load(at);
#pragma unroll
            for (int e = 0; e < to_size; ++e)
                part[e] = from_float<To>(values[k + e] + (accumulate ? to_float(part[e]) : 0.0f));
            part.store(at);
        }
    }
    for (int64_t i = packs * elements_per_pack + thread; i < n; i += all)
        to[i] = from_float<To>(to_float(from[i]) + (accumulate ? to_float(to[i]) : 0.0f));
}

unsigned blocks_for(const Stream& stream, int64_t n) {
    const int64_t wanted = ceil_div(ceil_div(n, int64_t{elements_per_pack}), int64_t{threads});
    return static_cast<unsigned>(std::clamp<int64_t>(
        wanted, 1, int64_t{blocks_per_multiprocessor} * limits_of(stream).multiprocessors));
}

}  // namespace

void round_to_bf16(Stream& stream, bf16* to, const float* from, int64_t n) {
    convert<__nv_bfloat16, float, false><<<blocks_for(stream, n), threads, 0, stream_of(stream)>>>(
        reinterpret_cast<__nv_bfloat16*>(to), from, n);
    CUDA_CHECK_LAUNCH();
}

void widen(Stream& stream, float* to, const void* from, DType from_dtype, int64_t n,
           bool accumulate) {
    with_element_type(from_dtype, [&]<class T>(T) {
        const auto kernel = accumulate ? convert<float, T, true> : convert<float, T, false>;
        kernel<<<blocks_for(stream, n), threads, 0, stream_of(stream)>>>(
            to, static_cast<const T*>(from), n);
    });
    CUDA_CHECK_LAUNCH();
}

}  // namespace train_gpt::cuda
