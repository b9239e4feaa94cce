// Building blocks for loops over rows. Sums and maxima are taken in a fixed order: element i goes
// to lane i mod 32, and the lanes are combined as a tree. The result depends only on the values,
// not on their address, the vector width or the number of threads.
#pragma once
#include <cstdint>
#include <limits>

#include "base/dtype.h"

namespace train_gpt {

/// out = value, rounded to nearest. In an `omp simd` loop, assigning a bf16 object keeps GCC 11 and
/// 12 from vectorising; assigning its bits does not.
inline void store(float& out, float value) { out = value; }
inline void store(bf16& out, float value) { out.bits = bf16(value).bits; }

/// 32 lanes keep two AVX-512 or four AVX2 accumulators busy, which hides the latency of an
/// addition.
constexpr int lane_count = 32;

/// sums[0] becomes Σ sums[l], l < 2·width, added as a tree. (In a loop over the widths, compilers
/// do not know how many additions each step has.)
template <int width, class T>
inline void add_halves(T* sums) {
#pragma omp simd
    for (int l = 0; l < width; ++l) sums[l] += sums[l + width];
    if constexpr (width > 1) add_halves<width / 2>(sums);
}

/// Σ f(i) for 0 <= i < n in fp32 lanes; the lanes are then added in type Total. The results of f
/// must not depend on the order of the calls.
template <class Total = float, class F>
inline Total lane_sum(int64_t n, F&& f) {
    alignas(64) float lanes[lane_count] = {};
    int64_t i = 0;
    for (; i + lane_count <= n; i += lane_count) {
#pragma omp simd
        for (int l = 0; l < lane_count; ++l) lanes[l] += f(i + l);
    }
    for (int l = 0; i + l < n; ++l) lanes[l] += f(i + l);

    Total sums[lane_count];
    for (int l = 0; l < lane_count; ++l) sums[l] = static_cast<Total>(lanes[l]);
    add_halves<lane_count / 2>(sums);
    return sums[0];
}

/// max f(i) for 0 <= i < n, −∞ for n = 0. NaNs are ignored.
template <class F>
inline float lane_max(int64_t n, F&& f) {
    alignas(64) float lanes[lane_count];
    for (float& lane : lanes) lane = -std::numeric_limits<float>::infinity();
    int64_t i = 0;
    for (; i + lane_count <= n; i += lane_count) {
#pragma omp simd
        for (int l = 0; l < lane_count; ++l) {
            const float value = f(i + l);
            lanes[l] = value > lanes[l] ? value : lanes[l];
        }
    }
    for (int l = 0; i + l < n; ++l) {
        const float value = f(i + l);
        lanes[l] = value > lanes[l] ? value : lanes[l];
    }
    float largest = lanes[0];
    for (int l = 1; l < lane_count; ++l) largest = lanes[l] > largest ? lanes[l] : largest;
    return largest;
}

}  // namespace train_gpt
