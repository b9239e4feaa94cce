// Vectors of floats for attention on the CPU, and what attention does with them: transposes,
// reductions and 2^x.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#if defined(__AVX512F__)
// GCC 11 and 12 warn about the undefined operand inside their own intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "base/dtype.h"

namespace train_gpt::cpu {

// lanes: floats in a vector. max_columns: vectors in a row of a micro-kernel's accumulator; with 16
// registers, 4 × 3 accumulators, 3 vectors of B and one of A take all of them.
#if defined(__AVX512F__)
constexpr int lanes = 16, max_columns = 4;
#elif defined(__AVX__)
constexpr int lanes = 8, max_columns = 3;
#elif defined(__aarch64__)
constexpr int lanes = 4, max_columns = 4;
#else
constexpr int lanes = 4, max_columns = 3;
#endif

typedef float vfloat __attribute__((vector_size(lanes * 4), may_alias));
typedef int32_t vint __attribute__((vector_size(lanes * 4), may_alias));
typedef float vfloat_unaligned __attribute__((vector_size(lanes * 4), aligned(4), may_alias));
typedef uint16_t vhalf_unaligned __attribute__((vector_size(lanes * 2), aligned(2), may_alias));
typedef uint32_t vuint __attribute__((vector_size(lanes * 4), may_alias));
typedef int32_t word_bits __attribute__((may_alias));

inline vfloat load(const float* p) { return *reinterpret_cast<const vfloat*>(p); }
inline void store(float* p, vfloat v) { *reinterpret_cast<vfloat*>(p) = v; }
inline vfloat all(float x) { return vfloat{} + x; }

inline vfloat load_unaligned(const float* p) {
    return *reinterpret_cast<const vfloat_unaligned*>(p);
}
inline vfloat load_unaligned(const bf16* p) {
    const auto half = *reinterpret_cast<const vhalf_unaligned*>(p);
    return reinterpret_cast<vfloat>(__builtin_convertvector(half, vuint) << 16);
}

/// A NaN in a is ignored, a NaN in b is not: max(limit, x) keeps a NaN in x.
inline vfloat max(vfloat a, vfloat b) {
#if defined(__AVX512F__)
    return reinterpret_cast<vfloat>(
        _mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
    return a > b ? a : b;
#endif
}

template <int... I>
vint make_iota(std::integer_sequence<int, I...>) {
    return vint{I...};
}
inline vint iota() { return make_iota(std::make_integer_sequence<int, lanes>{}); }

/// Transposes one bit of (row, lane) between rows a and b = a + step. The low result holds, in
/// lanes with that bit clear, a's lanes and, in lanes with it set, b's lanes with the bit clear.
/// The high result holds the rest.
template <int step, bool high, int... I>
inline vfloat exchange(vfloat a, vfloat b, std::integer_sequence<int, I...>) {
    constexpr auto source = [](int lane) {
        return lane % (2 * step) < step ? (high ? lane + step : lane)
                                        : (high ? lanes + lane : lanes + lane - step);
    };
#if defined(__clang__)
    return __builtin_shufflevector(a, b, source(I)...);
#else
    return __builtin_shuffle(a, b, vint{source(I)...});
#endif
}
template <int step, bool high>
inline vfloat exchange(vfloat a, vfloat b) {
    return exchange<step, high>(a, b, std::make_integer_sequence<int, lanes>{});
}

template <int step = lanes / 2>
[[gnu::always_inline]] inline void transpose(vfloat (&rows)[lanes]) {
#pragma GCC unroll 16
    for (int r = 0; r < lanes; ++r) {
        if (r & step) continue;
        const vfloat a = rows[r], b = rows[r + step];
        rows[r] = exchange<step, false>(a, b);
        rows[r + step] = exchange<step, true>(a, b);
    }
    if constexpr (step > 1) transpose<step / 2>(rows);
}

/// Lane i of the result combines all lanes of rows[i].
template <int step = lanes / 2, class Combine>
[[gnu::always_inline]] inline vfloat reduce_rows(vfloat (&rows)[lanes], Combine combine) {
#pragma GCC unroll 16
    for (int r = 0; r < step; ++r) {
        const vfloat a = rows[r], b = rows[r + step];
        rows[r] = combine(exchange<step, false>(a, b), exchange<step, true>(a, b));
    }
    if constexpr (step > 1) return reduce_rows<step / 2>(rows, combine);
    return rows[0];
}
constexpr auto take_sum = [](vfloat a, vfloat b) { return a + b; };
constexpr auto take_max = [](vfloat a, vfloat b) { return max(a, b); };

constexpr float log2_e = 1.44269504088896341f, ln_2 = 0.693147180559945309f;
constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

/// 2^x; 0 for x < −126, NaN for a NaN; meant for x <= 127. Exact at integers. x = n + r with
/// integer n and |r| <= ½; 2^r = 1 + r·P(r), where P has the smallest maximum relative error:
/// 9·10⁻⁸ (degree 5 in r) or, if `coarse`, 3·10⁻⁶ (degree 4), for results that are then rounded to
/// bf16.
template <bool coarse>
[[gnu::always_inline]] inline vfloat exp2(vfloat x) {
#if defined(__AVX512F__)
    const __m512 argument = reinterpret_cast<__m512>(x);
    // Intel's processors take 200 cycles to compute subnormal powers.
    const __mmask16 normal = _mm512_cmp_ps_mask(argument, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    const __m512 whole =
        _mm512_roundscale_ps(argument, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vfloat r = reinterpret_cast<vfloat>(_mm512_sub_ps(argument, whole));
#else
    constexpr float round_to_integer = 12582912.0f;  // 1.5·2²³: its unit in the last place is 1
    const vfloat shifted = x + round_to_integer;
    const vfloat r = x - (shifted - round_to_integer);
#endif
    vfloat p;
    if constexpr (coarse) {
        p = all(0.009582852944731712f);
        p = p * r + 0.055906426161527634f;
        p = p * r + 0.24024099111557007f;
        p = p * r + 0.6931241750717163f;
    } else {
        p = all(0.001326472731307149f);
        p = p * r + 0.009671512991189957f;
        p = p * r + 0.05550733581185341f;
        p = p * r + 0.24022242426872253f;
        p = p * r + 0.6931470036506653f;
    }
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    return reinterpret_cast<vfloat>(
        _mm512_maskz_scalef_ps(normal, reinterpret_cast<__m512>(p), whole));
#else
    // A multiplication, not an addition of exponents, so that a NaN stays a NaN whatever its bits
    // are.
    const vfloat power = reinterpret_cast<vfloat>((reinterpret_cast<vint>(shifted) + 127) << 23);
    return x < -126.0f ? vfloat{} : p * power;
#endif
}

/// tanh(x·ln 2 / 2), with a relative error below 4·10⁻⁷; NaN for a NaN. It is m / (m + 2) with m =
/// 2^x − 1 = 2^n·(2^r − 1) + 2^n − 1, x = n + r as in exp2, so that small x keep their digits.
[[gnu::always_inline]] inline vfloat tanh_of_half(vfloat x) {
    // Beyond ±30, the result is ±1. A NaN fails both comparisons and stays a NaN.
    x = x < -30.0f ? all(-30.0f) : x;
    x = x > 30.0f ? all(30.0f) : x;
    constexpr float round_to_integer = 12582912.0f;
    const vfloat shifted = x + round_to_integer;
    const vfloat r = x - (shifted - round_to_integer);
    vfloat p = all(0.001326472731307149f);
    p = p * r + 0.009671512991189957f;
    p = p * r + 0.05550733581185341f;
    p = p * r + 0.24022242426872253f;
    p = p * r + 0.6931470036506653f;
    const vfloat power = reinterpret_cast<vfloat>((reinterpret_cast<vint>(shifted) + 127) << 23);
    const vfloat m = power * (p * r) + (power - 1.0f);
    return m / (m + 2.0f);
}

/// A score's soft-cap (attention.h), of scores in units of log 2.
struct SoftCap {
    float cap, inverse, to_tanh;

    explicit SoftCap(float softcap)
        : cap(softcap * log2_e), inverse(1 / cap), to_tanh(2 * log2_e * inverse) {}
    [[gnu::always_inline]] vfloat operator()(vfloat score) const {
        return cap * tanh_of_half(score * to_tanh);
    }
    /// Its derivative, from the capped score.
    [[gnu::always_inline]] vfloat slope(vfloat capped) const {
        const vfloat t = capped * inverse;
        return 1.0f - t * t;
    }
};

}  // namespace train_gpt::cpu
