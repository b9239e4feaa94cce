// The sinks of attention on CUDA.
#pragma once
#include <limits>

#include "base/tensor.h"
#include "kernels/cuda_block.cuh"

namespace train_gpt::cuda {

/// The sink of head h; −∞, which adds nothing to a row's sum, if there are none.
__device__ __forceinline__ float sink_of(const Tensor& sinks, int h) {
    if (!sinks.data) return -std::numeric_limits<float>::infinity();
    return sinks.dtype == DType::bf16 ? to_float(static_cast<const __nv_bfloat16*>(sinks.data)[h])
                                      : static_cast<const float*>(sinks.data)[h];
}

}  // namespace train_gpt::cuda
