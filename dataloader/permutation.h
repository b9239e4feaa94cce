// The sample order: a pseudo-random permutation that is computed, not stored.
#pragma once
#include <array>
#include <cstdint>

namespace train_gpt {

/// A pseudo-random permutation of [0, n) that depends only on (seed, epoch). It needs O(1) memory
/// and gives any index at any time, so that a loader has no state to save and every rank computes
/// the same order.
///
/// A balanced Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from
/// pseudorandom functions", 1988) permutes the smallest domain 4^k >= n, k >= 1; an image outside
/// [0, n) is permuted again until it lies inside ("cycle walking": Black and Rogaway, "Ciphers with
/// arbitrary finite domains", 2002). As 4^k <= 4n, that takes at most four passes on average. The
/// round function is SplitMix64's finaliser (Steele, Lea and Flood, 2014).
class Permutation {
  public:
    /// 1 <= n <= 2^62.
    Permutation(uint64_t seed, uint64_t epoch, int64_t n);

    /// The image of `index`, 0 <= index < n.
    int64_t operator()(int64_t index) const;

    int64_t size() const { return n_; }

  private:
    static constexpr int rounds = 8;

    int64_t n_;
    int half_bits_;
    std::array<uint64_t, rounds> round_keys_;
};

}  // namespace train_gpt
