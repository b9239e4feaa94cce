// Rounding to grids on a GPU (exact_sums.h).
#pragma once
#include <cstdint>

#include "kernels/exact_math.h"

namespace train_gpt::cuda {

/// ⌊x · inverse⌉, ties to even, and within int32.
__device__ __forceinline__ int32_t rounded_on_device(float x, float inverse) {
    return __float2int_rn(fminf(fmaxf(x * inverse, -largest_rounded), largest_rounded));
}

__device__ __forceinline__ int32_t wrapped_sum(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}

}  // namespace train_gpt::cuda
