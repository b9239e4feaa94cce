#include <algorithm>

#include "device/copy.h"
#include "device/cuda_queue.h"

namespace train_gpt::cuda {

void copy_rows(Stream& stream, void* to, size_t to_stride, const void* from, size_t from_stride,
               size_t row_bytes, int64_t rows) {
    // cudaMemcpy2DAsync refuses rows that are further apart.
    constexpr size_t furthest = (size_t{1} << 31) - 1;
    if (rows == 1 || std::max(to_stride, from_stride) > furthest) {
        for (size_t r = 0; r < static_cast<size_t>(rows); ++r)
            cuda::copy(stream, static_cast<char*>(to) + r * to_stride,
                       static_cast<const char*>(from) + r * from_stride, row_bytes);
        return;
    }
    CUDA_CHECK(cudaMemcpy2DAsync(to, to_stride, from, from_stride, row_bytes,
                                 static_cast<size_t>(rows), cudaMemcpyDeviceToDevice,
                                 stream_of(stream)));
}

void copy(Stream& stream, void* to, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)));
}

void copy_now(const Device& device, void* to, const void* from, size_t bytes) {
    StepSubmission::require_none("copying synchronously");
    CUDA_CHECK(cudaSetDevice(device.index));
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
    // cudaMemcpy may return before data from pageable memory have landed, and does not wait for
    // copies within a device. Our streams do not wait for the legacy stream, which copies.
    CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
}

void clear(Stream& stream, void* memory, size_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream_of(stream)));
}

}  // namespace train_gpt::cuda
