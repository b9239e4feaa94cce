#include "kernels/fingerprint.h"

#include "kernels/blocks.h"

namespace train_gpt {

namespace {

template <class T>
uint64_t sum_of(const T* data, uint64_t first, int64_t count) {
    uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i)
        sum += hash_of_element(first + static_cast<uint64_t>(i), data[i]);
    return sum;
}

}  // namespace

void add_fingerprints(Stream& stream, std::span<const FingerprintSegment> segments) {
    TRAIN_GPT_ON_CUDA(stream.device, add_fingerprints(stream, segments));
    for_each_block(segments, [](const FingerprintSegment& segment, int64_t first, int64_t count) {
        const auto index = static_cast<uint64_t>(segment.first + first);
        const uint64_t sum =
            segment.element_bytes == 1
                ? sum_of(static_cast<const uint8_t*>(segment.data) + first, index, count)
            : segment.element_bytes == 2
                ? sum_of(static_cast<const uint16_t*>(segment.data) + first, index, count)
                : sum_of(static_cast<const uint32_t*>(segment.data) + first, index, count);
#pragma omp atomic
        *segment.sum += sum;
    });
}

}  // namespace train_gpt
