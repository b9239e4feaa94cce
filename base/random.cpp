#include "base/random.h"

#include <cmath>

namespace train_gpt {

namespace {

/// Two independent normal values from two random words.
std::array<float, 2> box_muller(uint32_t word0, uint32_t word1) {
    const float in_0_1 =
        static_cast<float>(word0) * 0x1p-32f + 0x1p-33f;  // (0, 1]: its logarithm is finite
    const float radius = std::sqrt(-2.0f * std::log(in_0_1));
    const float angle = static_cast<float>(word1) * (0x1p-32f * 6.28318531f);
    return {radius * std::cos(angle), radius * std::sin(angle)};
}

}  // namespace

float RandomStream::normal(uint64_t index) const {
    const uint32x4 words = block(index / 4);
    const uint64_t pair = index % 4 / 2 * 2;
    return box_muller(words[pair], words[pair + 1])[index % 2];
}

void RandomStream::fill_normal(float* out, int64_t n, float stddev, float mean,
                               uint64_t first_index) const {
    const uint64_t last_index = first_index + static_cast<uint64_t>(n);
    const int64_t first_block = static_cast<int64_t>(first_index / 4);
    const int64_t last_block = static_cast<int64_t>((last_index + 3) / 4);
#pragma omp parallel for schedule(static)
    for (int64_t number = first_block; number < last_block; ++number) {
        const uint32x4 words = block(static_cast<uint64_t>(number));
        const std::array<float, 2> low = box_muller(words[0], words[1]),
                                   high = box_muller(words[2], words[3]);
        const float values[4] = {low[0], low[1], high[0], high[1]};
        for (uint64_t i = 0; i < 4; ++i) {
            const uint64_t index = static_cast<uint64_t>(number) * 4 + i;
            if (index >= first_index && index < last_index)
                out[index - first_index] = mean + stddev * values[i];
        }
    }
}

}  // namespace train_gpt
