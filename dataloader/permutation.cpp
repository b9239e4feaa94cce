#include "dataloader/permutation.h"

#include <bit>
#include <cassert>

namespace train_gpt {

namespace {

/// A bijection of 64-bit words in which every input bit reaches every output bit.
uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

}  // namespace

Permutation::Permutation(uint64_t seed, uint64_t epoch, int64_t n) : n_(n) {
    assert(n >= 1 && n <= int64_t{1} << 62);
    const int bits = std::bit_width(static_cast<uint64_t>(n - 1));
    half_bits_ = bits <= 2 ? 1 : (bits + 1) / 2;
    // Two mixes with different offsets: neighbouring seeds and epochs give unrelated keys.
    constexpr uint64_t golden_ratio = 0x9e3779b97f4a7c15;
    uint64_t state = mix(mix(seed + golden_ratio) + epoch);
    for (uint64_t& key : round_keys_) key = mix(state += golden_ratio);
}

int64_t Permutation::operator()(int64_t index) const {
    assert(index >= 0 && index < n_);
    const uint64_t half_mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t x = static_cast<uint64_t>(index);
    do {
        uint64_t left = x >> half_bits_, right = x & half_mask;
        for (const uint64_t key : round_keys_) {
            const uint64_t new_right = left ^ (mix(right + key) & half_mask);
            left = right;
            right = new_right;
        }
        x = left << half_bits_ | right;
    } while (x >= static_cast<uint64_t>(n_));
    return static_cast<int64_t>(x);
}

}  // namespace train_gpt
