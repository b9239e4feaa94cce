// The exponential function for softmax loops: branch-free float arithmetic that compilers turn into
// vector code.
#pragma once
#include <bit>
#include <cstdint>
#include <limits>

namespace train_gpt {

/// e^x with a relative error below 2⁻²³ for −87 <= x <= 88; 0 below that range, +∞ above it, NaN
/// for a NaN. x = n·ln 2 + r with integer n and |r| <= ½·ln 2; e^r = 1 + r + r²·P(r), where P is
/// the degree-4 polynomial with the smallest maximum relative error in e^r (3.1·10⁻⁹).
inline float fast_exp(float x) {
    constexpr float log2_e = 1.44269504f;
    constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;  // n·ln2_high is exact
    // 1.5·2²³: its unit in the last place is 1, and its lowest 9 bits are 0.
    constexpr float round_to_integer = 12582912.0f;

    const float shifted = x * log2_e + round_to_integer;
    const float n = shifted - round_to_integer;
    const float r = (x - n * ln2_high) - n * ln2_low;
    float p = 0.001381454f;
    p = p * r + 0.008368745f;
    p = p * r + 0.04166839f;
    p = p * r + 0.16666521f;
    p = p * r + 0.49999994f;
    p = (p * r) * r + r;
    p = p + 1.0f;
    const float scaled =
        std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(shifted) << 23));
    const float not_below = x < -87.0f ? 0.0f : scaled;
    return x > 88.0f ? std::numeric_limits<float>::infinity() : not_below;
}

/// tanh x with a relative error below 3·10⁻⁷; NaN for a NaN. tanh x = m / (m + 2) with m =
/// e^2x − 1 = 2^n·(e^r − 1) + 2^n − 1, where 2x = n·ln 2 + r as in fast_exp, so that small x keep
/// their digits.
inline float fast_tanh(float x) {
    constexpr float log2_e = 1.44269504f;
    constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    constexpr float round_to_integer = 12582912.0f;

    // Beyond ±10, tanh x is ±1. A NaN fails both comparisons and stays a NaN.
    const float above = x < -10.0f ? -10.0f : x;
    const float y = 2.0f * (above > 10.0f ? 10.0f : above);
    const float shifted = y * log2_e + round_to_integer;
    const float n = shifted - round_to_integer;
    const float r = (y - n * ln2_high) - n * ln2_low;
    float p = 0.001381454f;
    p = p * r + 0.008368745f;
    p = p * r + 0.04166839f;
    p = p * r + 0.16666521f;
    p = p * r + 0.49999994f;
    p = (p * r) * r + r;
    const float power = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) + 127) << 23);
    const float m = power * p + (power - 1.0f);
    return m / (m + 2.0f);
}

}  // namespace train_gpt
