// GELU (gelu.h) and its derivative for one number: branch-free float arithmetic that compilers turn
// into vector code.
#pragma once
#include "kernels/exp_math.h"

namespace train_gpt {

/// gelu(x) = x·σ(2u), u = √(2/π)·(x + 0.044715·x³), because ½·(1 + tanh u) = σ(2u).
/// |error| < 1.5·10⁻⁷·|x|.
inline float gelu(float x) {
    const float two_u = x * (1.595769122f + 0.07135481283f * (x * x));
    return x / (1.0f + fast_exp(-two_u));
}

/// gelu'(x) = σ + x·σ·(1 − σ)·2u', σ = σ(2u), 2u' = √(8/π)·(1 + 3·0.044715·x²). |error| < 2.5·10⁻⁷.
inline float gelu_derivative(float x) {
    // Beyond ±10 the derivative is 0 or 1; inside, nothing overflows. A NaN fails both comparisons
    // and stays a NaN.
    const float above = x < -10.0f ? -10.0f : x;
    const float z = above > 10.0f ? 10.0f : above;
    const float z2 = z * z;
    const float e = fast_exp(-z * (1.595769122f + 0.07135481283f * z2));
    const float sigma = 1.0f / (1.0f + e);
    return sigma + z * (sigma * (e * sigma)) * (1.595769122f + 0.2140644385f * z2);
}

}  // namespace train_gpt
