#include "dataloader/permutation.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "test/catch.h"
#include "test/random.h"

using namespace train_gpt;

TEST_CASE("a permutation is a bijection of [0, n) for every small n and random larger ones") {
    std::vector<int64_t> sizes;
    for (int64_t n = 1; n <= 70; ++n) sizes.push_back(n);
    for (int i = 0; i < 10; ++i) sizes.push_back(random_int(71, 200000));
    for (const int64_t n : sizes) {
        CAPTURE(n);
        const Permutation permutation(test_rng()(), test_rng()(), n);
        std::vector<bool> seen(static_cast<size_t>(n));
        for (int64_t i = 0; i < n; ++i) {
            const int64_t image = permutation(i);
            REQUIRE(image >= 0);
            REQUIRE(image < n);
            REQUIRE(!seen[static_cast<size_t>(image)]);
            seen[static_cast<size_t>(image)] = true;
        }
    }
}

TEST_CASE("a permutation of up to 2^62 elements stays inside and does not repeat") {
    for (const int64_t n : {int64_t{1} << 62, (int64_t{1} << 62) - 1, (int64_t{1} << 60) + 1,
                            random_int(int64_t{1} << 33, int64_t{1} << 61)}) {
        CAPTURE(n);
        const Permutation permutation(test_rng()(), 3, n);
        std::vector<int64_t> images;
        for (int64_t i = 0; i < 500; ++i) {
            images.push_back(permutation(i));
            images.push_back(permutation(n - 1 - i));
        }
        std::sort(images.begin(), images.end());
        CHECK(images.front() >= 0);
        CHECK(images.back() < n);
        CHECK(std::adjacent_find(images.begin(), images.end()) == images.end());
    }
}

TEST_CASE("a permutation is a function of seed and epoch, and both change it") {
    const uint64_t seed = test_rng()();
    const int64_t n = random_int(1000, 5000);
    const auto images = [n](uint64_t seed, uint64_t epoch) {
        const Permutation permutation(seed, epoch, n);
        std::vector<int64_t> all;
        for (int64_t i = 0; i < n; ++i) all.push_back(permutation(i));
        return all;
    };
    const auto first = images(seed, 0);
    CHECK(first == images(seed, 0));
    for (const auto& other : {images(seed, 1), images(seed + 1, 0),
                              images(seed ^ (uint64_t{1} << 63), 0), images(seed - 1, 1)}) {
        int64_t fixed = 0;
        for (int64_t i = 0; i < n; ++i)
            fixed += first[static_cast<size_t>(i)] == other[static_cast<size_t>(i)];
        CHECK(fixed <
              20);  // 1 is expected of unrelated permutations; 20 has a probability below 1e-18
    }
}

TEST_CASE("every element is in every place about equally often") {
    // Pearson's chi-square over (place, image) of a small permutation under many epochs.
    const int64_t n = random_int(5, 40);
    CAPTURE(n);
    constexpr int epoch_count = 20000;
    const uint64_t seed = test_rng()();
    std::vector<int> count(static_cast<size_t>(n * n));
    for (int epoch = 0; epoch < epoch_count; ++epoch) {
        const Permutation permutation(seed, static_cast<uint64_t>(epoch), n);
        for (int64_t i = 0; i < n; ++i) ++count[static_cast<size_t>(i * n + permutation(i))];
    }
    const double expected = static_cast<double>(epoch_count) / static_cast<double>(n);
    double chi2 = 0;
    for (const int c : count) chi2 += (c - expected) * (c - expected) / expected;
    const double freedom = static_cast<double>((n - 1) * (n - 1));
    CHECK(chi2 < freedom + 7 * std::sqrt(2 * freedom) + 20);
}
