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

/// The terms of which experts' products sum a slice by itself; these sums are added in fp32.
constexpr int64_t slice_terms = 128;

/// cut_off_of_sums() for products of experts, of terms with independent random signs. A slice's
/// error is at most cut_off_of_sums(slice_terms) units of its sum S_i, whatever the terms are. So
/// all errors are at most as many units of Σ|S_i|, which is at most √n·√(ΣS_i²) for n slices. That
/// √(ΣS_i²) is about |ΣS_i| is statistical: it holds in the root mean square, for such signs. Where
/// all terms are positive Σ|S_i| is the sum, and cut_off_of_sums(slice_terms) is the bound.
inline int64_t cut_off_of_slices(int64_t terms) {
    const int64_t slices = (terms + slice_terms - 1) / slice_terms;
    return static_cast<int64_t>(
        std::ceil(static_cast<double>(cut_off_of_sums(std::min(terms, slice_terms))) *
                  std::sqrt(static_cast<double>(slices))));
}

}  // namespace train_gpt::fp8_reference
