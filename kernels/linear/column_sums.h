// Column sums of gradients on the CPU, in an order that depends only on the number of rows.
#pragma once
#include <cstdint>

#include "kernels/lanes.h"

namespace train_gpt {

// Slabs of rows are summed into fp32 partials, then the partials, always in the same order. Memory
// sets the speed: 1024 columns are long enough runs for the prefetcher, and their sums stay in the
// L1 cache.
constexpr int64_t slab_rows = 128, slab_cols = 1024;

/// sums [cols] = column sums of the first `rows` rows of dy, which are ld elements apart.
template <class T>
void sum_slab(float* sums, const T* dy, int64_t rows, int64_t cols, int64_t ld) {
    for (int64_t j = 0; j < cols; ++j) sums[j] = 0.0f;
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) {
        const T *r0 = dy + i * ld, *r1 = r0 + ld, *r2 = r1 + ld, *r3 = r2 + ld;
#pragma omp simd
        for (int64_t j = 0; j < cols; ++j) {
            sums[j] += (to_float(r0[j]) + to_float(r1[j])) + (to_float(r2[j]) + to_float(r3[j]));
        }
    }
    for (; i < rows; ++i) {
        const T* row = dy + i * ld;
#pragma omp simd
        for (int64_t j = 0; j < cols; ++j) sums[j] += to_float(row[j]);
    }
}

}  // namespace train_gpt
