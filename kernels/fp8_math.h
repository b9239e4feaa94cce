// The codes of fp8, for CPU and CUDA code (fp8.h).
#pragma once
#include <bit>
#include <cstdint>

#include "kernels/fp8.h"

namespace train_gpt {

/// Formats as types. A code is sign · 2^7 + magnitude. Magnitudes ascend, as the bits of floats do.
struct E4M3 {
    static constexpr int mantissa_bits = 3, bias = 7;
    static constexpr float largest = 448;
    static constexpr uint8_t largest_code = 0x7e;
};
struct E5M2 {
    static constexpr int mantissa_bits = 2, bias = 15;
    static constexpr float largest = 57344;
    static constexpr uint8_t largest_code = 0x7b;
};

constexpr float largest_of(Fp8Format format) {
    return format == Fp8Format::e4m3 ? E4M3::largest : E5M2::largest;
}

/// The code of ±∞ and NaN, without their signs: a NaN in both formats, so that what is not finite
/// stays so.
constexpr uint8_t fp8_nan = 0x7f;

/// A number's bits without the low ones, to nearest, ties to even.
constexpr uint32_t without_low_bits(uint32_t bits, int dropped) {
    return (bits + ((1u << (dropped - 1)) - 1u) + ((bits >> dropped) & 1u)) >> dropped;
}

/// Where the codes of small numbers begin: below the smallest normal number, 2^(1 − bias), all
/// numbers of a format are multiples of one unit.
template <class Format>
struct SmallNumbers {
    static constexpr int dropped = 23 - Format::mantissa_bits;
    static constexpr uint32_t least_normal = static_cast<uint32_t>(128 - Format::bias) << 23;
    /// Added to a small number, it leaves multiples of the unit.
    static constexpr float multiples =
        std::bit_cast<float>(static_cast<uint32_t>(127 + 1 - Format::bias + dropped) << 23);
};

/// The nearest code, ties to even; what is beyond the largest number becomes the largest.
template <class Format>
constexpr uint8_t fp8_code(float value) {
    using Small = SmallNumbers<Format>;
    const uint32_t word = std::bit_cast<uint32_t>(value), magnitude = word & 0x7fffffffu;
    const uint32_t normal = without_low_bits(magnitude, Small::dropped) -
                            (static_cast<uint32_t>(127 - Format::bias) << Format::mantissa_bits);
    const uint32_t small =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + Small::multiples) -
        std::bit_cast<uint32_t>(Small::multiples);
    const uint32_t nearest = magnitude < Small::least_normal ? small : normal;
    const uint32_t finite = nearest > Format::largest_code ? Format::largest_code : nearest;
    const uint32_t code = finite | ((word >> 24) & 0x80u);
    return static_cast<uint8_t>(magnitude >= 0x7f800000u ? uint32_t{fp8_nan} : code);
}

/// The number of a code.
template <class Format>
constexpr float fp8_value(uint8_t code) {
    const uint32_t magnitude = code & 0x7fu;
    const uint32_t exponent = magnitude >> Format::mantissa_bits,
                   mantissa = magnitude & ((1u << Format::mantissa_bits) - 1u);
    constexpr auto power = [](int e) {
        return std::bit_cast<float>(static_cast<uint32_t>(127 + e) << 23);
    };
    float value =
        exponent == 0
            ? static_cast<float>(mantissa) * power(1 - Format::bias - Format::mantissa_bits)
            : (1.0f + static_cast<float>(mantissa) * power(-Format::mantissa_bits)) *
                  power(static_cast<int>(exponent) - Format::bias);
    if (magnitude > Format::largest_code)  // also e5m2's ∞, which no rounding gives
        value = std::bit_cast<float>(0x7fc00000u);
    return (code & 0x80u) != 0 ? -value : value;
}

/// fp8_value(fp8_code(value)), without the code.
template <class Format>
constexpr float fp8_rounded(float value) {
    using Small = SmallNumbers<Format>;
    const uint32_t word = std::bit_cast<uint32_t>(value), magnitude = word & 0x7fffffffu;
    const uint32_t normal = without_low_bits(magnitude, Small::dropped) << Small::dropped;
    const float small = (std::bit_cast<float>(magnitude) + Small::multiples) - Small::multiples;
    const uint32_t nearest =
        magnitude < Small::least_normal ? std::bit_cast<uint32_t>(small) : normal;
    constexpr uint32_t largest = std::bit_cast<uint32_t>(Format::largest);
    const uint32_t finite = nearest > largest ? largest : nearest;
    const uint32_t number = finite | (word & 0x80000000u);
    return std::bit_cast<float>(magnitude >= 0x7f800000u ? 0x7fc00000u : number);
}

/// The factor that brings a tensor with this largest magnitude to the range of a format. Below
/// 1e-12 it grows no further; where the magnitude is not finite, it is 1.
constexpr float fp8_scale(float amax, float largest) {
    if (!(amax - amax == 0)) return 1;
    return largest / (amax > 1e-12f ? amax : 1e-12f);
}

/// The scale of a step after steps with this largest magnitude; 0, which leaves the choice to the
/// call, if they had only zeros.
constexpr float fp8_delayed_scale(float amax, float largest) {
    return amax > 0 ? fp8_scale(amax, largest) : 0;
}

/// |value| for a maximum: NaN counts as ∞.
constexpr uint32_t magnitude_of(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value) & 0x7fffffffu;
    return word < 0x7f800000u ? word : 0x7f800000u;
}

/// value · scale, for fp8_code() and fp8_rounded(): where the product of a finite value is too
/// large for fp32, fp32's largest number, which saturates.
constexpr float fp8_scaled(float value, float scale) {
    const float scaled = value * scale;
    const uint32_t word = std::bit_cast<uint32_t>(scaled);
    const bool overflows = (word & 0x7fffffffu) == 0x7f800000u && magnitude_of(value) < 0x7f800000u;
    return std::bit_cast<float>(overflows ? word - 1 : word);
}

/// Whether rounding with this scale brought a tensor's largest magnitude down.
constexpr bool saturates(float amax, float scale, float largest) {
    return scale > 0 && amax - amax == 0 && amax * scale > largest * (1 + 0x1p-20f);
}

}  // namespace train_gpt
