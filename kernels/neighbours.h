// Loops over rows of bf16 that compute two neighbours at a time. The two are the halves of a 32-bit
// word, from and to which fp32 values come by one shift or mask: no vector is widened, narrowed or
// permuted, which costs more than the arithmetic of kernels that are bound by memory. A loop body
// is written once, for the value types float (an element) and Pair (two neighbours):
//
//   for_positions<T>(C, [=](auto at) { at.store(out, (at(x) - mean) * rstd * at(w)); });
//
// Each element is computed as if it were alone. Both forms give the same bits if the compiler fuses
// the same product; in a·b − c·d it may fuse either, so name both first.
#pragma once
#include <cstring>
#include <type_traits>

#include "kernels/lanes.h"

namespace train_gpt {

/// The values of elements 2i and 2i + 1. A float becomes a pair of itself.
struct Pair {
    float even, odd;

    Pair(float value) : even(value), odd(value) {}  // NOLINT(google-explicit-constructor)
    Pair(float even_, float odd_) : even(even_), odd(odd_) {}

    friend Pair operator-(Pair a) { return {-a.even, -a.odd}; }
    friend Pair operator+(Pair a, Pair b) { return {a.even + b.even, a.odd + b.odd}; }
    friend Pair operator-(Pair a, Pair b) { return {a.even - b.even, a.odd - b.odd}; }
    friend Pair operator*(Pair a, Pair b) { return {a.even * b.even, a.odd * b.odd}; }
    friend Pair operator/(Pair a, Pair b) { return {a.even / b.even, a.odd / b.odd}; }
};

/// f of an element, or of both.
template <class F>
inline float each(F&& f, float x) {
    return f(x);
}
template <class F>
inline Pair each(F&& f, Pair x) {
    return {f(x.even), f(x.odd)};
}

/// Element i of a row.
struct Element {
    static constexpr int width = 1;
    int64_t i;

    template <class T>
    float operator()(const T* row) const {
        return to_float(row[i]);
    }
    /// Returns the value as it is stored: rounded.
    template <class T>
    float store(T* row, float value) const {
        train_gpt::store(row[i], value);
        return to_float(row[i]);
    }
};

/// Elements 2i and 2i + 1 of a row of bf16.
struct Neighbours {
    static constexpr int width = 2;
    int64_t i;

    static Pair of_word(uint32_t word) {
        return {std::bit_cast<float>(word << 16), std::bit_cast<float>(word & 0xffff0000u)};
    }
    Pair operator()(const bf16* row) const {
        uint32_t word;
        std::memcpy(&word, row + 2 * i, sizeof(word));
        return of_word(word);
    }
    Pair store(bf16* row, Pair value) const {
        const uint32_t word =
            bf16::rounded(value.even) >> 16 | (bf16::rounded(value.odd) & 0xffff0000u);
        std::memcpy(static_cast<void*>(row + 2 * i), &word, sizeof(word));
        return of_word(word);
    }
    Pair operator()(const float* row) const { return {row[2 * i], row[2 * i + 1]}; }
    Pair store(float* row, Pair value) const {
        row[2 * i] = value.even;
        row[2 * i + 1] = value.odd;
        return value;
    }
};

/// How rows of T are best visited.
template <class T>
using PositionOf = std::conditional_t<std::is_same_v<T, bf16>, Neighbours, Element>;

/// Calls f(position) for all elements of rows of n, in any order.
template <class T, class F>
[[gnu::always_inline]] inline void for_positions(int64_t n, F&& f) {
    using Position = PositionOf<T>;
#pragma omp simd
    for (int64_t i = 0; i < n / Position::width; ++i) f(Position{i});
    if (n % Position::width) f(Element{n - 1});
}

/// Asks for n elements, so that they come from memory while the processor is busy with others. Any
/// address will do.
template <class T>
[[gnu::always_inline]] inline void prefetch(const T* row, int64_t n) {
    constexpr int64_t line = 64 / sizeof(T);
    for (int64_t i = 0; i < n; i += line) __builtin_prefetch(row + i);
}

/// The same as for_positions, and asks for rows that are read next.
template <class T, class F, class... Next>
[[gnu::always_inline]] inline void for_positions_before(int64_t n, F&& f, const Next*... next) {
    using Position = PositionOf<T>;
    constexpr int64_t piece = 2048 / sizeof(T);
    for (int64_t first = 0; first < n; first += piece) {
        const int64_t last = first + piece < n ? first + piece : n;
        (prefetch(next + first, last - first), ...);
#pragma omp simd
        for (int64_t i = first / Position::width; i < last / Position::width; ++i) f(Position{i});
        if (last % Position::width) f(Element{last - 1});
    }
}

/// Σ f(position) over all elements of rows of n, as lane_sum adds them.
template <class T, class F>
[[gnu::always_inline]] inline float position_sum(int64_t n, F&& f) {
    using Position = PositionOf<T>;
    constexpr int width = Position::width, step = lane_count / width;
    alignas(64) float even[step] = {}, odd[step] = {};
    int64_t i = 0;
    for (; i + step <= n / width; i += step) {
#pragma omp simd
        for (int l = 0; l < step; ++l) {
            const auto value = f(Position{i + l});
            if constexpr (width == 2) {
                even[l] += value.even;
                odd[l] += value.odd;
            } else {
                even[l] += value;
            }
        }
    }
    float sums[lane_count];
    for (int l = 0; l < step; ++l) {
        sums[width * l] = even[l];
        if constexpr (width == 2) sums[width * l + 1] = odd[l];
    }
    i *= width;
    for (int l = 0; i + l < n; ++l) sums[l] += f(Element{i + l});
    add_halves<lane_count / 2>(sums);
    return sums[0];
}

}  // namespace train_gpt
