#include "device/copy.h"
#include "device/cuda_queue.h"

namespace train_gpt::cuda {

void copy_rows(Stream& stream, void* to, size_t to_stride, const void* from, size_t from_stride,
               size_t row_bytes, int64_t rows) {
    // A distance of rows has a limit of 2 GiB.
    if (rows == 1) return cuda::copy(stream, to, from, row_bytes);
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
}

void clear(Stream& stream, void* memory, size_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream_of(stream)));
}

}  // namespace train_gpt::cuda
