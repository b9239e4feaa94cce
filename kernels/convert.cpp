#include "kernels/convert.h"

#include "kernels/lanes.h"

namespace train_gpt {

void round_to_bf16(Stream& stream, bf16* to, const float* from, int64_t n) {
    TRAIN_GPT_ON_CUDA(stream.device, round_to_bf16(stream, to, from, n));
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; ++i) store(to[i], from[i]);
}

void widen(Stream& stream, float* to, const void* from, DType from_dtype, int64_t n,
           bool accumulate) {
    TRAIN_GPT_ON_CUDA(stream.device, widen(stream, to, from, from_dtype, n, accumulate));
    with_float_type(from_dtype, [&]<class T>(T) {
        const T* elements = static_cast<const T*>(from);
        if (accumulate) {  // NOLINT(bugprone-branch-clone): OpenMP's loops all look alike to it
#pragma omp parallel for simd schedule(static)
            for (int64_t i = 0; i < n; ++i) to[i] += to_float(elements[i]);
        } else {
#pragma omp parallel for simd schedule(static)
            for (int64_t i = 0; i < n; ++i) to[i] = to_float(elements[i]);
        }
    });
}

}  // namespace train_gpt
