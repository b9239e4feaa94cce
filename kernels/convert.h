// Conversion between fp32 and bf16, and sums of two buffers.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "device/stream.h"

namespace train_gpt {

/// to[i] = from[i] rounded to nearest, for i < n.
void round_to_bf16(Stream& stream, bf16* to, const float* from, int64_t n);

/// to[i] = from[i], or to[i] + from[i] in fp32 if `accumulate`, for i < n; from is fp32 or bf16.
/// `to` may be the same buffer as `from` if that is fp32.
void widen(Stream& stream, float* to, const void* from, DType from_dtype, int64_t n,
           bool accumulate);

namespace cuda {  // convert.cu
void round_to_bf16(Stream& stream, bf16* to, const float* from, int64_t n);
void widen(Stream& stream, float* to, const void* from, DType from_dtype, int64_t n,
           bool accumulate);
}  // namespace cuda

}  // namespace train_gpt
