// Element types of tensors.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

namespace train_gpt {

enum class DType : uint8_t {
    fp32,
    bf16,
    int32,
    int64,
    fp64,  // int64 and fp64: only for collectives and sums
    uint8  // only for codes of the optimizer's state (kernels/dynamic_map.h)
};

constexpr size_t size_of(DType dtype) {
    return dtype == DType::uint8                           ? 1
           : dtype == DType::bf16                          ? 2
           : dtype == DType::fp64 || dtype == DType::int64 ? 8
                                                           : 4;
}
constexpr const char* name_of(DType dtype) {
    switch (dtype) {
        case DType::fp32:
            return "fp32";
        case DType::bf16:
            return "bf16";
        case DType::int32:
            return "int32";
        case DType::int64:
            return "int64";
        case DType::uint8:
            return "uint8";
        case DType::fp64:
            break;
    }
    return "fp64";
}

/// bfloat16: the upper half of an IEEE-754 binary32. Storage only; arithmetic happens in float.
struct bf16 {
    uint16_t bits = 0;

    bf16() = default;
    /// Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
    explicit bf16(float value) : bits(static_cast<uint16_t>(rounded(value) >> 16)) {}
    /// The same in the upper half of a word; the lower half is undefined.
    static uint32_t rounded(float value) {
        const uint32_t word = std::bit_cast<uint32_t>(value);
        return value != value ? word | 0x400000u : word + 0x7fffu + ((word >> 16) & 1u);
    }
    explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};
static_assert(sizeof(bf16) == 2);

/// The bits of a finite value in bf16, rounded up if the lower half of a random word is larger than
/// the distance to the next number allows: the mean over all words is the value.
constexpr uint16_t rounded_at_random(float value, uint32_t word) {
    return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + (word & 0xffffu)) >> 16);
}

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) { return static_cast<float>(value); }

template <class T>
inline constexpr DType dtype_of = DType::fp32;
template <>
inline constexpr DType dtype_of<bf16> = DType::bf16;
template <>
inline constexpr DType dtype_of<int32_t> = DType::int32;
template <>
inline constexpr DType dtype_of<int64_t> = DType::int64;
template <>
inline constexpr DType dtype_of<double> = DType::fp64;

/// Calls f(float{}) or f(bf16{}): turns a run-time floating dtype into a type.
template <class F>
decltype(auto) with_float_type(DType dtype, F&& f) {
    return dtype == DType::bf16 ? f(bf16{}) : f(float{});
}

}  // namespace train_gpt
