#include <algorithm>

#include "device/copy.h"
#include "device/cuda_queue.h"

namespace train_gpt::cuda {

void copy_rows(Stream& stream, const RowCopy& c) {
    // cudaMemcpy2DAsync refuses rows that are further apart.
    constexpr size_t furthest = (size_t{1} << 31) - 1;
    if (c.rows == 1 || std::max(c.to_stride, c.from_stride) > furthest) {
        for (size_t r = 0; r < static_cast<size_t>(c.rows); ++r)
            cuda::copy(stream, static_cast<char*>(c.to) + r * c.to_stride,
                       static_cast<const char*>(c.from) + r * c.from_stride, c.row_bytes);
        return;
    }
    CUDA_CHECK(cudaMemcpy2DAsync(c.to, c.to_stride, c.from, c.from_stride, c.row_bytes,
                                 static_cast<size_t>(c.rows), cudaMemcpyDeviceToDevice,
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
