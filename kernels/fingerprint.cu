#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/cuda_segments.cuh"
#include "kernels/fingerprint.h"

namespace train_gpt::cuda {

namespace {

// Each thread block processes one block of norm_block elements (cuda_segments.cuh).
constexpr int threads = 256;

/// Σ of the hashes of this thread's elements among data[count], in packs of 4 where the address
/// allows it.
template <class T>
__device__ __forceinline__ uint64_t sum_of(const T* data, uint64_t first, int count) {
    struct alignas(4 * sizeof(T)) Four {
        T values[4];
    };
    const int in_packs = packed(count, data), thread = static_cast<int>(threadIdx.x);
    uint64_t sum = 0;
    for (int i = 4 * thread; i < in_packs; i += 4 * threads) {
        const Four four = *reinterpret_cast<const Four*>(data + i);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            sum += hash_of_element(first + static_cast<uint64_t>(i + j), four.values[j]);
    }
    for (int i = in_packs + thread; i < count; i += threads)
        sum += hash_of_element(first + static_cast<uint64_t>(i), data[i]);
    return sum;
}

/// Integers: the order in which thread blocks add does not matter.
__global__ void __launch_bounds__(threads)
    add_hashes(const __grid_constant__ Group<FingerprintSegment> group) {
    __shared__ unsigned long long shared[threads / warp_size];
    const Range range = range_of(group, blockIdx.x);
    const FingerprintSegment& segment = group.segments[range.segment];
    const auto first = static_cast<uint64_t>(segment.first + range.first);
    const uint64_t sum =
        segment.element_bytes == 1
            ? sum_of(static_cast<const uint8_t*>(segment.data) + range.first, first, range.count)
        : segment.element_bytes == 2
            ? sum_of(static_cast<const uint16_t*>(segment.data) + range.first, first, range.count)
            : sum_of(static_cast<const uint32_t*>(segment.data) + range.first, first, range.count);
    const auto total = block_sum(static_cast<unsigned long long>(sum), shared);
    if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(segment.sum), total);
}

}  // namespace

void add_fingerprints(Stream& stream, std::span<const FingerprintSegment> segments) {
    for_each_group(segments, [&](const Group<FingerprintSegment>& group) {
        add_hashes<<<group.blocks, threads, 0, stream_of(stream)>>>(group);
        CUDA_CHECK_LAUNCH();
    });
}

}  // namespace train_gpt::cuda
