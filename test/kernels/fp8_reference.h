// The numbers of fp8, from the definition of the formats (Micikevicius et al., arXiv 2209.05433).
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/fp8.h"
#include "test/kernels/test_device.h"

namespace train_gpt::fp8_reference {

inline const char* name_of(Fp8Format format) { return format == Fp8Format::e4m3 ? "e4m3" : "e5m2"; }
inline float largest_number(Fp8Format format) {
    return format == Fp8Format::e4m3 ? 448.0f : 57344.0f;
}

/// NaN for a code of no finite number.
inline double number_of(Fp8Format format, int code) {
    const int mantissa_bits = format == Fp8Format::e4m3 ? 3 : 2,
              bias = format == Fp8Format::e4m3 ? 7 : 15, magnitude = code % 128,
              exponent = magnitude >> mantissa_bits, mantissa = magnitude % (1 << mantissa_bits);
    const double fraction = std::ldexp(mantissa, -mantissa_bits),
                 value = exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                       : std::ldexp(1 + fraction, exponent - bias);
    if (value > largest_number(format)) return std::numeric_limits<double>::quiet_NaN();
    return code < 128 ? value : -value;
}

/// The code of the number nearest to a value: of two that are equally near, the even one; beyond
/// the largest number its own; 0x7f for what is not finite.
inline uint8_t nearest_code(Fp8Format format, float value) {
    if (!std::isfinite(value)) return 127;
    const int sign = std::signbit(value) ? 128 : 0;
    int best = 0;
    const double x = std::min<double>(std::abs(value), largest_number(format));
    const auto distance = [&](int code) { return std::abs(number_of(format, code) - x); };
    for (int code = 1; code < 128; ++code)
        if (distance(code) < distance(best) || (distance(code) == distance(best) && code % 2 == 0))
            best = code;
    return static_cast<uint8_t>(sign + best);
}

/// value · scale as fp8_round() must take it: of a finite value, at most fp32's largest number.
inline float scaled(float value, float scale) {
    if (!std::isfinite(value)) return value;
    constexpr double most = std::numeric_limits<float>::max();
    return static_cast<float>(std::clamp(static_cast<double>(value) * scale, -most, most));
}

/// x · scale as its nearest codes, which are then read as numbers over the scale.
inline std::vector<double> rounded(const std::vector<double>& x, Fp8Format format, float scale) {
    std::vector<double> numbers;
    for (int code = 0; code < 256; ++code) numbers.push_back(number_of(format, code));
    std::vector<double> result = x;
    for (double& value : result)
        value = numbers[nearest_code(format, static_cast<float>(value) * scale)] /
                static_cast<double>(scale);
    return result;
}
/// The same with the scale of the matrix's own largest magnitude.
inline std::vector<double> rounded(const std::vector<double>& x, Fp8Format format) {
    double largest = 0;
    for (const double value : x) largest = std::max(largest, std::abs(value));
    return rounded(x, format,
                   largest_number(format) / std::max(static_cast<float>(largest), 1e-12f));
}

/// What Errors::check() allows for sums of fp8 products, as its cut_off. A GPU's tensor cores keep
/// about 14 bits, 2¹⁰ units of fp32, each time they add 32 products. Simulated ones and CPUs add in
/// fp32.
inline int64_t cut_off_of_sums(int64_t terms) {
    return test_device().is_cuda() && !device_is_simulated() ? (terms + 31) / 32 * 1024 : 0;
}

/// The same for products of experts, which sum slices of 128 terms by themselves and add these sums
/// in fp32. Terms with independent random signs: the slices' errors are independent then, and their
/// squares add up as those of the sums do, so that the bound is that of one slice, whatever the
/// depth. That is statistical.
constexpr int64_t slice_terms = 128;
inline int64_t cut_off_of_slices(int64_t terms) {
    return cut_off_of_sums(std::min(terms, slice_terms));
}
/// The same for positive terms, a bound that always holds: of 32 products and the sum so far each
/// loses less than a unit of 2⁻¹³ of the largest one's power of two, which is at most the slice's
/// sum, 2¹¹ units of 2⁻²⁴; and the slices' sums add up to the result. One H100 cuts each off
/// towards zero there. Sums of 3200 such terms without slices had three times this error.
inline int64_t cut_off_of_positive_slices() { return cut_off_of_sums(slice_terms) * 2 * 33; }

}  // namespace train_gpt::fp8_reference
