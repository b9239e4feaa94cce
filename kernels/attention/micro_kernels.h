// The two matrix products that attention on the CPU is built from (attention.cpp) where it does not
// use AMX, over packed operands.
#pragma once
#include "kernels/attention/vectors.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define TRAIN_GPT_BF16_PAIRS 1
#else
#define TRAIN_GPT_BF16_PAIRS 0
#endif
#if TRAIN_GPT_BF16_PAIRS && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define TRAIN_GPT_AMX 1
#else
#define TRAIN_GPT_AMX 0
#endif

namespace train_gpt::cpu {

/// Rows of a matrix: element (r, d) is data[r·stride + d].
template <class T>
struct Rows {
    T* data = nullptr;
    int64_t stride = 0;  // in elements

    T* row(int64_t r) const { return data + r * stride; }
    /// The same rows from column d on.
    Rows from_column(int64_t d) const { return {data + d, stride}; }
};

/// Rows of a micro-kernel's accumulator. It divides the tile and the vector length, so that a panel
/// of four rows never straddles a vector of keys that was not computed.
constexpr int panel_rows = 4;

/// Operands as plain floats.
struct Fp32 {
    using Element = float;
    using Word = float;                             // what one step of the summed dimension reads
    static constexpr int depth = 1;                 // elements of the summed dimension in a word
    static constexpr int unit = lanes;              // lengths are padded to multiples of it
    static constexpr int panel = panel_rows;        // rows for which the same keys are computed
    static constexpr bool transposed_sums = false;  // of dK and dV
    struct Setup {};                                // what a thread needs while it computes
    using Vector = vfloat;

    [[gnu::always_inline]] static void multiply_add(vfloat& acc, Word a, Vector b) { acc += a * b; }
};

#if TRAIN_GPT_BF16_PAIRS
/// Operands as pairs of bf16.
struct Bf16Pairs {
    using Element = bf16;
    using Word = word_bits;
    static constexpr int depth = 2, unit = lanes, panel = panel_rows;
    static constexpr bool transposed_sums = false;
    struct Setup {};
    using Vector = vint;

    [[gnu::always_inline]] static void multiply_add(vfloat& acc, Word a, Vector b) {
        acc = reinterpret_cast<vfloat>(_mm512_dpbf16_ps(
            reinterpret_cast<__m512>(acc), (__m512bh)_mm512_set1_epi32(a), (__m512bh)b));
    }
};
#endif

/// Without this, compilers tend to reload a row of B for each multiply-add that uses it, which
/// makes loads the bottleneck.
template <class Vector>
[[gnu::always_inline]] inline void keep_in_register(Vector& x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#elif defined(__SSE2__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
}

/// Rows of an operand in words. Not Rows<const Word>, since a template argument loses the attribute
/// with which words may alias elements.
template <class Engine>
struct WordRows {
    const typename Engine::Word* data;
    int64_t stride;  // in words

    const typename Engine::Word* row(int64_t r) const { return data + r * stride; }
};

enum class A { rows, columns };      // layout of the broadcast operand: A[m, k] or A[k, m]
enum class C { scale, accumulate };  // C = factor·A·B, or C = factor[m]·C + A·B

/// One panel of C: 4 rows by N vectors, with `words` steps of the summed dimension. factor: one
/// number (C::scale), or null or one for each row (C::accumulate).
template <class Engine, A order, C update, int N>
[[gnu::noinline]] void multiply_panel(int words, WordRows<Engine> a, WordRows<Engine> b,
                                      Rows<float> c, const float* factor) {
    vfloat acc[panel_rows][N];
#pragma GCC unroll 4
    for (int m = 0; m < panel_rows; ++m) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            if constexpr (update == C::scale) {
                acc[m][n] = vfloat{};
            } else {
                acc[m][n] = load(c.row(m) + n * lanes) * (factor ? factor[m] : 1.0f);
            }
        }
    }
#pragma GCC unroll 1
    for (int k = 0; k < words; ++k) {
        typename Engine::Vector row[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            row[n] = *reinterpret_cast<const typename Engine::Vector*>(b.data + n * lanes);
            keep_in_register(row[n]);
        }
#pragma GCC unroll 4
        for (int m = 0; m < panel_rows; ++m) {
            const auto x = order == A::rows ? *a.row(m) : a.data[m];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) Engine::multiply_add(acc[m][n], x, row[n]);
        }
        a.data += order == A::rows ? 1 : a.stride;
        b.data += b.stride;
    }
#pragma GCC unroll 4
    for (int m = 0; m < panel_rows; ++m) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            store(c.row(m) + n * lanes, update == C::scale ? acc[m][n] * *factor : acc[m][n]);
        }
    }
}

/// A panel whose rows have so many vectors.
template <class Engine, A order, C update>
inline void multiply_columns(int columns, int words, WordRows<Engine> a, WordRows<Engine> b,
                             Rows<float> c, const float* factor) {
    switch (columns) {
        case 1:
            return multiply_panel<Engine, order, update, 1>(words, a, b, c, factor);
        case 2:
            return multiply_panel<Engine, order, update, 2>(words, a, b, c, factor);
        case 3:
            return multiply_panel<Engine, order, update, 3>(words, a, b, c, factor);
        default:
            return multiply_panel<Engine, order, update, max_columns>(words, a, b, c, factor);
    }
}

}  // namespace train_gpt::cpu
