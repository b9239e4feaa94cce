// The arithmetic of exact sums (exact_sums.h) for one number or block, the same on CPUs and GPUs.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/adamw.h"

namespace train_gpt {

constexpr int32_t min_exponent = -120, max_exponent = 120;  // of grids
constexpr int32_t no_exponent = INT32_MIN;                  // not known yet
constexpr int64_t int_limit = int64_t{1} << 31;
constexpr int64_t most_units = int64_t{1} << 40;  // that a micro-batch counts for a block

constexpr int32_t clamped_exponent(int32_t e) {
    return e < min_exponent ? min_exponent : e > max_exponent ? max_exponent : e;
}

/// 2^e, for normal numbers.
constexpr float power_of_two(int32_t e) {
    return std::bit_cast<float>(static_cast<uint32_t>(e + 127) << 23);
}
constexpr double double_power_of_two(int32_t e) {
    return std::bit_cast<double>(static_cast<uint64_t>(e + 1023) << 52);
}
/// ⌊log₂ x⌋ of a normal number above 0.
constexpr int32_t exponent_of(double x) {
    return static_cast<int32_t>(std::bit_cast<uint64_t>(x) >> 52) - 1023;
}

/// The bits of |x|. If x is finite, they are below infinity_bits, and ordered as the numbers are.
constexpr uint32_t magnitude_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }
constexpr uint32_t infinity_bits = 0x7f800000u;

/// The largest float below 2^31, in which an element that does not fit ends.
constexpr float largest_rounded = 2147483520.0f;

/// ⌊x · inverse⌉, ties to even. Undefined, but a number, for NaN.
inline int32_t rounded_to_grid(float x, float inverse) {
    const float units = x * inverse;
    const float above = units > -largest_rounded ? units : -largest_rounded;
    return static_cast<int32_t>(std::nearbyint(above < largest_rounded ? above : largest_rounded));
}

/// min(⌈largest · inverse⌉, most_units).
constexpr int64_t grid_units(float largest, float inverse) {
    const float units = largest * inverse;
    if (!(units < static_cast<float>(most_units))) return most_units;
    const auto whole = static_cast<int64_t>(units);
    return whole + (static_cast<float>(whole) < units ? 1 : 0);
}

/// The finest grid on which `contributions` blocks with this largest element leave the headroom.
constexpr int32_t first_exponent(float largest, int64_t contributions, int headroom) {
    if (!(largest > 0)) return no_exponent;
    const double most = static_cast<double>(largest) * static_cast<double>(contributions);
    return clamped_exponent(exponent_of(most) + 1 - (31 - headroom));
}

/// The grid after a step whose S was `units`.
constexpr int32_t next_exponent(int32_t e, int64_t units, int headroom, bool overflows) {
    if (units == 0) return e;
    const int32_t wanted =
        clamped_exponent(e + exponent_of(static_cast<double>(units)) + 1 - (31 - headroom));
    if (wanted > e) return wanted;
    return wanted < e && !overflows ? e - 1 : e;
}

/// A block's grid, from its own and its tensor's coarsest one. Gradients of experts come and go: a
/// block whose own were small for some steps may next have one of the tensor's largest.
constexpr int32_t most_bits_finer = 4;
constexpr int32_t grid_of_block(int32_t own, int32_t coarsest) {
    return own < coarsest - most_bits_finer ? coarsest - most_bits_finer : own;
}

/// F of norm_scales().
constexpr int32_t norm_scale(int32_t coarsest, int64_t blocks) {
    const int32_t log_blocks =
        blocks > 1 ? exponent_of(static_cast<double>(blocks - 1)) + 1 : 0;  // ⌈log₂ blocks⌉
    return 2 * coarsest + 12 + log_blocks;
}

/// ⌊squares · 2^(2·e) / 2^scale⌉, of a sum of squares of integers.
constexpr int64_t norm_units(double squares, int32_t e, int32_t scale) {
    return static_cast<int64_t>(squares * double_power_of_two(2 * e - scale) + 0.5);
}

}  // namespace train_gpt
