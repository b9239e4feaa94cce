// GELU (gelu.h) and its derivative for one number, in device code; gelu_math.h has the host
// versions.
#pragma once
#include "kernels/exp_math.cuh"

namespace train_gpt::cuda {

// T is the type in which a result will be stored. For fp32, |error| < 1.5·10⁻⁷·|x|, and 3·10⁻⁷ for
// the derivative. For bf16, |error| < 6·10⁻⁷·|x|, and 10⁻⁶ for the derivative, far below the
// rounding to bf16 that follows. GELU is then 8 instructions.

/// gelu(x) = x·σ(2u), u = √(2/π)·(x + 0.044715·x³), because ½·(1 + tanh u) = σ(2u).
template <class T>
__device__ __forceinline__ float gelu(float x) {
    const float minus_two_u = x * (-1.595769122f - 0.07135481283f * (x * x));
    return quotient_for<T>(x, 1.0f + exp_for<T>(minus_two_u));
}

/// gelu'(x) = σ + x·σ·(1 − σ)·2u', σ = σ(2u), 2u' = √(8/π)·(1 + 3·0.044715·x²).
template <class T>
__device__ __forceinline__ float gelu_derivative(float x) {
    // Beyond ±10 the derivative is 0 or 1; inside, nothing overflows. A NaN fails both comparisons
    // and stays a NaN.
    const float above = x < -10.0f ? -10.0f : x;
    const float z = above > 10.0f ? 10.0f : above;
    const float z2 = z * z;
    const float e = exp_for<T>(z * (-1.595769122f - 0.07135481283f * z2));
    const float sigma = quotient_for<T>(1.0f, 1.0f + e);
    return sigma + z * (sigma * (e * sigma)) * (1.595769122f + 0.2140644385f * z2);
}

}  // namespace train_gpt::cuda
