// Python's random.Random for whole numbers, so that items are shuffled and drawn as other programs
// do: the Mersenne Twister MT19937 (Matsumoto and Nishimura 1998), seeded and used as CPython's
// Lib/random.py and Modules/_randommodule.c do.
#pragma once
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace train_gpt {

class PythonRandom {
  public:
    /// random.Random(seed)
    explicit PythonRandom(uint64_t seed);

    /// A uniform number below n, which is above 0: random.Random._randbelow(n).
    uint64_t below(uint64_t n);

    /// random.Random.shuffle(items)
    template <class T>
    void shuffle(std::vector<T>& items) {
        for (size_t i = items.size(); i-- > 1;)
            std::swap(items[i], items[static_cast<size_t>(below(i + 1))]);
    }

    /// random.Random.sample(range(n), k): k different numbers below n; k is at most n.
    std::vector<size_t> sample(size_t n, size_t k);

  private:
    std::mt19937 words_;
};

}  // namespace train_gpt
