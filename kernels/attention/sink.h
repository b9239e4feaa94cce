// How a head's sink enters the rows of attention on the CPU.
#pragma once
#include <algorithm>
#include <cmath>

#include "base/tensor.h"
#include "kernels/attention/vectors.h"

namespace train_gpt::cpu {

/// What a row's sums are multiplied by at the end, and its log Σ exp.
struct RowEnd {
    float factor, lse;
};

/// A head's sink, if there is one: one more score in each row, whose value is zero.
struct Sink {
    bool exists;
    float log2 = 0;  // in units of log 2

    Sink(const Tensor& sinks, int64_t h) : exists(sinks) {
        if (exists)
            log2 = log2_e * (sinks.dtype == DType::bf16 ? to_float(sinks.as<bf16>()[h])
                                                        : sinks.as<float>()[h]);
    }

    /// What ends a row of scores whose maximum is row_max, in units of log 2. total: the row's
    /// Σ 2^(score − row_max).
    RowEnd end_row(float row_max, float total) const {
        if (!exists) return {1.0f / total, row_max * ln_2 + std::log(total)};
        const float largest = std::max(row_max, log2), rescale = std::exp2(row_max - largest),
                    sum = total * rescale + std::exp2(log2 - largest);
        return {rescale / sum, largest * ln_2 + std::log(sum)};
    }
};

}  // namespace train_gpt::cpu
