// IEEE-754 binary16, in which model files may store weights. Storage only; no kernel takes it.
#pragma once
#include <bit>
#include <cstdint>

namespace train_gpt {

struct fp16 {
    uint16_t bits = 0;

    fp16() = default;
    /// Rounds to nearest, ties to even: magnitudes from 65520 up become infinity, those below
    /// 2^-14 become multiples of 2^-24. A NaN becomes a quiet NaN.
    explicit fp16(float value) {
        const uint32_t word = std::bit_cast<uint32_t>(value), magnitude = word & 0x7fffffffu;
        uint32_t half;
        if (magnitude > 0x7f800000u) {
            half = 0x7e00u;
        } else if (magnitude >= 0x477ff000u) {
            half = 0x7c00u;
        } else if (magnitude < 0x38800000u) {
            // Floats in [0.5, 1) are 2^-24 apart, so the addition does the rounding.
            half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
                   std::bit_cast<uint32_t>(0.5f);
        } else {
            constexpr uint32_t bias = 127 - 15;
            half = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (bias << 10);
        }
        bits = static_cast<uint16_t>((word >> 16 & 0x8000u) | half);
    }
    explicit operator float() const {
        const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
        const uint32_t exponent = (bits >> 10) & 31u, fraction = bits & 1023u;
        if (exponent == 0) {  // subnormal: fraction · 2^-24, exact in a float
            const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
            return sign ? -magnitude : magnitude;
        }
        const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
        return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
    }
};
static_assert(sizeof(fp16) == 2);

}  // namespace train_gpt
