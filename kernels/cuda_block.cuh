// Shared by CUDA kernels: 16-byte packs of elements, conversions, and sums over a warp and over a
// block in a fixed order.
#pragma once
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "base/dtype.h"

namespace train_gpt::cuda {

constexpr int warp_size = 32;

/// The device type of an element: float, or __nv_bfloat16 for train_gpt::bf16.
template <class T>
struct ElementOf {
    using type = T;
};
template <>
struct ElementOf<bf16> {
    using type = __nv_bfloat16;
};

/// Calls f(float{}) or f(__nv_bfloat16{}): turns a run-time floating dtype into the device's type.
template <class F>
decltype(auto) with_element_type(DType dtype, F&& f) {
    return dtype == DType::bf16 ? f(__nv_bfloat16{}) : f(float{});
}

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
/// Rounds to nearest, ties to even.
template <class T>
__device__ __forceinline__ T from_float(float value) {
    // Converting a pair is one fast instruction; converting a single number is a slow one on sm_90.
    if constexpr (sizeof(T) == 2)
        return __low2bfloat16(__floats2bfloat162_rn(value, 0.0f));
    else
        return value;
}

/// 16 bytes of elements, moved by one instruction. Addresses are multiples of 16 bytes.
template <class T>
struct alignas(16) Pack {
    static constexpr int size = 16 / static_cast<int>(sizeof(T));
    T values[size];

    __device__ T& operator[](int i) { return values[i]; }
    __device__ const T& operator[](int i) const { return values[i]; }

    static __device__ __forceinline__ Pack load(const T* from) {
        return from_bits(*reinterpret_cast<const uint4*>(from));
    }
    /// For data that no other block reads again soon: the caches evict it first.
    static __device__ __forceinline__ Pack load_streaming(const T* from) {
        return from_bits(__ldcs(reinterpret_cast<const uint4*>(from)));
    }
    __device__ __forceinline__ void store(T* to) const { *reinterpret_cast<uint4*>(to) = bits(); }
    __device__ __forceinline__ void store_streaming(T* to) const {
        __stcs(reinterpret_cast<uint4*>(to), bits());
    }

  private:
    static __device__ __forceinline__ Pack from_bits(uint4 bits) {
        Pack pack;
        __builtin_memcpy(&pack, &bits, sizeof pack);
        return pack;
    }
    __device__ __forceinline__ uint4 bits() const {
        uint4 result;
        __builtin_memcpy(&result, this, sizeof result);
        return result;
    }
};

/// The elements of a pack as floats: one instruction per bf16 element.
__device__ __forceinline__ void unpack(float (&to)[4], const Pack<float>& from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = from[i];
}
__device__ __forceinline__ void unpack(float (&to)[8], const Pack<__nv_bfloat16>& from) {
    unsigned words[4];
    __builtin_memcpy(words, &from, sizeof words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = __uint_as_float(words[i] << 16);
        to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}
/// The floats rounded to nearest, ties to even; half an instruction per bf16 element.
template <class T>
__device__ __forceinline__ Pack<T> pack(const float (&from)[Pack<T>::size]) {
    Pack<T> result;
    if constexpr (sizeof(T) == 2) {
        __nv_bfloat162 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
        __builtin_memcpy(&result, pairs, sizeof result);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) result[i] = from[i];
    }
    return result;
}

/// `width` elements in global memory, moved by one instruction; addresses are multiples of their
/// size. width: a Pack's, or 1.
template <class T, int width>
struct alignas(width * sizeof(T)) Vector {
    T values[width];

    static __device__ __forceinline__ Vector load(const T* from) {
        Vector result;
        if constexpr (width == Pack<T>::size) {
            const Pack<T> pack = Pack<T>::load(from);
            __builtin_memcpy(&result, &pack, sizeof result);
        } else {
            static_assert(width == 1);
            result.values[0] = *from;
        }
        return result;
    }
    __device__ __forceinline__ void store(T* to) const {
        if constexpr (width == Pack<T>::size) {
            uint4 bits;
            __builtin_memcpy(&bits, this, sizeof *this);
            __stwb(reinterpret_cast<uint4*>(to), bits);  // nvcc may split a plain one into four
        } else {
            *to = values[0];
        }
    }
};

/// The elements as floats, and floats rounded to elements.
template <class T, int width>
__device__ __forceinline__ void unpack(float (&to)[width], const Vector<T, width>& from) {
    if constexpr (width == Pack<T>::size) {
        Pack<T> pack;
        __builtin_memcpy(&pack, &from, sizeof pack);
        unpack(to, pack);
    } else {
        to[0] = to_float(from.values[0]);
    }
}
template <class T, int width>
__device__ __forceinline__ Vector<T, width> vector_of(const float (&from)[width]) {
    Vector<T, width> result;
    if constexpr (width == Pack<T>::size) {
        const Pack<T> packed = pack<T>(from);
        __builtin_memcpy(&result, &packed, sizeof result);
    } else {
        result.values[0] = from_float<T>(from[0]);
    }
    return result;
}

inline bool is_aligned(const void* address) {
    return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

/// Calls f(integral_constant) with the widest vector that divides the columns of a row.
template <class T, class F>
void with_width(int64_t cols, bool aligned, F&& f) {
    if (aligned && cols % Pack<T>::size == 0)
        f(std::integral_constant<int, Pack<T>::size>{});
    else
        f(std::integral_constant<int, 1>{});
}

/// Sum over the lanes of a full warp, the same in every lane.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}

/// Sum over a block of whole warps, the same in every thread. `shared` holds one element per warp
/// and may be reused after the next __syncthreads().
template <class T>
__device__ __forceinline__ T block_sum(T value, T* shared) {
    value = warp_sum(value);
    if (threadIdx.x % warp_size == 0) shared[threadIdx.x / warp_size] = value;
    __syncthreads();
    T total = 0;
    for (unsigned warp = 0; warp < blockDim.x / warp_size; ++warp) total += shared[warp];
    return total;
}

/// Whether rows of C elements that begin at these addresses are made of whole packs.
template <class T, class... Tensors>
bool rows_are_packed(int64_t C, const Tensors&... tensors) {
    return C % Pack<T>::size == 0 &&
           ((reinterpret_cast<uintptr_t>(tensors.data) % sizeof(Pack<T>) == 0) && ...);
}

template <class T>
constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

}  // namespace train_gpt::cuda
