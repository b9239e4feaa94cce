// Random numbers as functions, not sequences: every value depends only on (seed, purpose, tensor,
// step, index), not on the number of threads or ranks or on the order of the calls.
#pragma once
#include <array>
#include <cstdint>

namespace train_gpt {

using uint32x4 = std::array<uint32_t, 4>;

/// Philox4x32-10, a counter-based generator: a keyed bijection of 128-bit counters whose outputs
/// pass as independent random words. Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy
/// as 1, 2, 3", SC 2011.
inline uint32x4 philox(std::array<uint32_t, 2> key, uint32x4 counter) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t{0xd2511f53u} * counter[0];
        const uint64_t product1 = uint64_t{0xcd9e8d57u} * counter[2];
        counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
                   static_cast<uint32_t>(product1),
                   static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
                   static_cast<uint32_t>(product0)};
        key[0] += 0x9e3779b9u;  // the golden ratio
        key[1] += 0xbb67ae85u;  // √3 − 1
    }
    return counter;
}

/// What random numbers are for. A seed's results depend on these values: append, never renumber.
enum class RandomPurpose : uint32_t { init = 0, sampling = 1, data = 2, synthetic = 3, test = 4 };

/// The random numbers of one purpose, tensor and step, indexed by element.
class RandomStream {
  public:
    RandomStream(uint64_t seed, RandomPurpose purpose, uint32_t tensor, uint64_t step);

    uint32_t bits(uint64_t index) const { return block(index / 4)[index % 4]; }
    /// In [0, 1), a multiple of 2⁻²⁴.
    float uniform(uint64_t index) const { return static_cast<float>(bits(index) >> 8) * 0x1p-24f; }
    /// Standard normal by Box & Muller (1958); |value| < 6.8.
    float normal(uint64_t index) const;

    /// out[i] = mean + stddev·normal(first_index + i), computed by all threads.
    void fill_normal(float* out, int64_t n, float stddev, float mean = 0.0f,
                     uint64_t first_index = 0) const;

  private:
    uint32x4 block(uint64_t number) const {
        return philox(key_, {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32),
                             high_[0], high_[1]});
    }

    std::array<uint32_t, 2> key_, high_;
};

}  // namespace train_gpt
