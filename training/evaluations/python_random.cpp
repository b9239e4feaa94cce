#include "training/evaluations/python_random.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <numeric>
#include <unordered_set>

namespace train_gpt {

namespace {

/// The state after init_by_array(key), in the form in which std::mt19937 takes it: generate() gives
/// the words of the state.
class InitialState {
  public:
    using result_type = uint32_t;

    explicit InitialState(const std::vector<uint32_t>& key) {
        constexpr size_t n = size;
        state_[0] = 19650218U;
        for (size_t i = 1; i < n; ++i)
            state_[i] = 1812433253U * mixed(i - 1) + static_cast<uint32_t>(i);
        size_t i = 1, j = 0;
        const auto next = [&](uint32_t factor, uint32_t add, bool adds) {
            state_[i] ^= mixed(i - 1) * factor;
            state_[i] = adds ? state_[i] + add : state_[i] - static_cast<uint32_t>(i);
            if (++i < n) return;
            state_[0] = state_[n - 1];
            i = 1;
        };
        for (size_t k = std::max(n, key.size()); k > 0; --k) {
            next(1664525U, key[j] + static_cast<uint32_t>(j), true);
            if (++j == key.size()) j = 0;
        }
        for (size_t k = n - 1; k > 0; --k) next(1566083941U, 0, false);
        state_[0] = 0x80000000U;
    }

    template <class Iterator>
    void generate(Iterator begin, Iterator end) const {
        std::copy_n(state_.begin(), end - begin, begin);
    }

  private:
    static constexpr size_t size = std::mt19937::state_size;
    uint32_t mixed(size_t i) const { return state_[i] ^ (state_[i] >> 30); }

    std::array<uint32_t, size> state_{};
};

std::mt19937 seeded(uint64_t seed) {
    std::vector<uint32_t> key{static_cast<uint32_t>(seed)};
    if (seed >> 32) key.push_back(static_cast<uint32_t>(seed >> 32));
    InitialState state(key);
    return std::mt19937(state);
}

}  // namespace

PythonRandom::PythonRandom(uint64_t seed) : words_(seeded(seed)) {}

uint64_t PythonRandom::below(uint64_t n) {
    assert(n > 0);
    const int bits = std::bit_width(n);
    for (;;) {
        uint64_t drawn;
        if (bits <= 32) {
            drawn = words_() >> (32 - bits);
        } else {  // the low word comes first
            drawn = words_();
            drawn |= uint64_t{words_() >> (64 - bits)} << 32;
        }
        if (drawn < n) return drawn;
    }
}

std::vector<size_t> PythonRandom::sample(size_t n, size_t k) {
    assert(k <= n);
    // Whether a list of all numbers is smaller than a set of the drawn ones, in CPython.
    size_t set_size = 21;
    if (k > 5) {
        size_t power = 1;  // the smallest power of 4 that is at least 3·k
        while (power < 3 * k) power *= 4;
        set_size += power;
    }
    std::vector<size_t> drawn(k);
    if (n <= set_size) {
        std::vector<size_t> pool(n);
        std::iota(pool.begin(), pool.end(), size_t{0});
        for (size_t i = 0; i < k; ++i) {
            const size_t j = static_cast<size_t>(below(n - i));
            drawn[i] = pool[j];
            pool[j] = pool[n - i - 1];
        }
        return drawn;
    }
    std::unordered_set<size_t> seen;
    for (size_t& number : drawn) do {
            number = static_cast<size_t>(below(n));
        } while (!seen.insert(number).second);
    return drawn;
}

}  // namespace train_gpt
