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
constexpr uint32x4 philox(std::array<uint32_t, 2> key, uint32x4 counter) {
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
enum class RandomPurpose : uint32_t {
    init = 0,
    sampling = 1,
    data = 2,
    synthetic = 3,
    test = 4,
    rounding = 5
};

/// The random numbers of one purpose, tensor and step, indexed by element.
class RandomStream {
  public:
    // The words that name a stream pass through the generator once and become its key and the
    // upper half of its counter. So none of them is truncated, and each stream has 2⁶⁴ blocks.
    constexpr RandomStream(uint64_t seed, RandomPurpose purpose, uint32_t tensor, uint64_t step) {
        const uint32x4 name =
            philox({static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
                   {static_cast<uint32_t>(purpose), tensor, static_cast<uint32_t>(step),
                    static_cast<uint32_t>(step >> 32)});
        key_ = {name[0], name[1]};
        high_ = {name[2], name[3]};
    }

    uint32_t bits(uint64_t index) const { return block(index / 4)[index % 4]; }
    /// bits() of the elements 4·number … 4·number + 3.
    constexpr uint32x4 block(uint64_t number) const {
        return philox(key_, {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32),
                             high_[0], high_[1]});
    }
    /// The lower halves of bits() of n·4 elements from 4·first on, in vector instructions.
    template <int n>
    void low_halves(uint64_t first, uint16_t (&out)[4 * n]) const;
    /// In [0, 1), a multiple of 2⁻²⁴.
    float uniform(uint64_t index) const { return static_cast<float>(bits(index) >> 8) * 0x1p-24f; }
    /// Standard normal by Box & Muller (1958); |value| < 6.8.
    float normal(uint64_t index) const;

    /// out[i] = mean + stddev·normal(first_index + i), computed by all threads.
    void fill_normal(float* out, int64_t n, float stddev, float mean = 0.0f,
                     uint64_t first_index = 0) const;

  private:
    std::array<uint32_t, 2> key_ = {}, high_ = {};
};

template <int n>
void RandomStream::low_halves(uint64_t first, uint16_t (&out)[4 * n]) const {
    // philox() of n counters, word by word
    alignas(64) uint32_t words[4][n];
    for (int i = 0; i < n; ++i) {
        words[0][i] = static_cast<uint32_t>(first + static_cast<uint64_t>(i));
        words[1][i] = static_cast<uint32_t>((first + static_cast<uint64_t>(i)) >> 32);
        words[2][i] = high_[0], words[3][i] = high_[1];
    }
    uint32_t key0 = key_[0], key1 = key_[1];
    for (int round = 0; round < 10; ++round) {
#pragma omp simd
        for (int i = 0; i < n; ++i) {
            const uint64_t product0 = uint64_t{0xd2511f53u} * words[0][i],
                           product1 = uint64_t{0xcd9e8d57u} * words[2][i];
            words[0][i] = static_cast<uint32_t>(product1 >> 32) ^ words[1][i] ^ key0;
            words[1][i] = static_cast<uint32_t>(product1);
            words[2][i] = static_cast<uint32_t>(product0 >> 32) ^ words[3][i] ^ key1;
            words[3][i] = static_cast<uint32_t>(product0);
        }
        key0 += 0x9e3779b9u, key1 += 0xbb67ae85u;
    }
    for (int i = 0; i < 4 * n; ++i) out[i] = static_cast<uint16_t>(words[i % 4][i / 4]);
}

}  // namespace train_gpt
