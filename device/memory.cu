// The CUDA side of memory.h.
#include <algorithm>

#include "device/cuda.h"
#include "device/cuda_queue.h"

namespace train_gpt::cuda {

uint64_t memory_available(const Device& device) {
    CUDA_CHECK(cudaSetDevice(device.index));
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    // Our kernels and those of libraries are loaded into the same memory when they first run.
    constexpr size_t for_kernels = size_t{512} << 20;
    return free - std::min(free, for_kernels);
}

namespace {

/// The result of an allocation: null when out of memory. Any other failure throws Error.
void* or_null(cudaError_t status, void* memory) {
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return nullptr;
    }
    CUDA_CHECK(status);
    return memory;
}

}  // namespace

void* allocate(const Device& device, size_t bytes) {
    StepSubmission::require_none("allocating memory");
    CUDA_CHECK(cudaSetDevice(device.index));
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, bytes);
    return or_null(status, memory);
}

void release(const Device& device, void* memory) {
    cudaSetDevice(device.index);
    cudaFree(memory);
}

void* allocate_pinned(const Device& device, size_t bytes) {
    StepSubmission::require_none("allocating host memory");
    CUDA_CHECK(cudaSetDevice(device.index));
    void* memory = nullptr;
    const cudaError_t status = cudaHostAlloc(&memory, bytes, cudaHostAllocDefault);
    return or_null(status, memory);
}

void release_pinned(void* memory) { cudaFreeHost(memory); }

}  // namespace train_gpt::cuda
