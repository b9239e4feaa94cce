// The exponential function and quotients in device code, as exact as the type of a result asks for.
#pragma once
#include "kernels/cuda_block.cuh"

namespace train_gpt::cuda {

// T is the type in which a result will be stored. For fp32 both are accurate; for bf16 they are the
// hardware's approximations, with relative errors far below the rounding to bf16 that follows.

template <class T>
__device__ __forceinline__ float exp_for(float x) {
    if constexpr (sizeof(T) == 2) {
        float result;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504f));
        return result;
    } else {
        return expf(x);
    }
}

template <class T>
__device__ __forceinline__ float quotient_for(float a, float b) {
    if constexpr (sizeof(T) == 2) {
        float reciprocal;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
        return a * reciprocal;
    } else {
        return a / b;
    }
}

/// For bf16, the absolute error is below 10⁻⁶.
template <class T>
__device__ __forceinline__ float tanh_for(float x) {
    if constexpr (sizeof(T) == 2)
        return 1.0f - quotient_for<T>(2.0f, 1.0f + exp_for<T>(2.0f * x));
    else
        return tanhf(x);
}

}  // namespace train_gpt::cuda
