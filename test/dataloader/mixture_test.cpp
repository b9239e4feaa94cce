#include "dataloader/mixture.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "dataloader/permutation.h"
#include "test/catch.h"
#include "test/random.h"

using namespace train_gpt;

namespace {

std::vector<double> random_weights(size_t n) {
    std::vector<double> weights;
    for (size_t i = 0; i < n; ++i)
        weights.push_back(std::pow(10, std::uniform_real_distribution<double>(-6, 6)(test_rng())));
    return weights;
}

}  // namespace

TEST_CASE("a mixture deals each source its samples in order, in the shares of the weights") {
    for (const size_t n : {1, 2, 3, 7, 64}) {
        const std::vector<double> weights = random_weights(n);
        double sum = 0;
        for (const double weight : weights) sum += weight;
        Mixture mixture(test_rng()(), weights);
        std::vector<int64_t> dealt(n);
        const int64_t samples = 3 * Mixture::block + random_int(0, Mixture::block);
        for (int64_t g = 0; g < samples; ++g) {
            if (g % Mixture::block == 0 || random_int(0, 2000) == 0)
                REQUIRE(mixture.counts_before(g) == dealt);
            const Mixture::Draw draw = mixture(g);
            REQUIRE(draw.source >= 0);
            REQUIRE(draw.source < static_cast<int>(n));
            REQUIRE(draw.index == dealt[static_cast<size_t>(draw.source)]++);
        }
        const std::vector<int64_t> counts = mixture.counts_before(3 * Mixture::block);
        const auto heaviest = std::ranges::max_element(weights) - weights.begin();
        for (size_t s = 0; s < n; ++s) {
            const double share = weights[s] / sum * 3 * static_cast<double>(Mixture::block);
            const double excess = static_cast<double>(counts[s]) - share;
            CAPTURE(n, s, share, heaviest);
            if (static_cast<std::ptrdiff_t>(s) == heaviest) {
                CHECK(excess >= -1e-6);
                CHECK(excess <= static_cast<double>(n));
            } else {
                CHECK(excess > -1 - 1e-6);
                CHECK(excess <= 1e-6);
            }
        }
    }
}

TEST_CASE("what rounding leaves goes to the heaviest source, not to a tiny first one") {
    const std::vector<double> weights{1e-7, 0.31, 5.7, 2.3};
    const double sum = 1e-7 + 0.31 + 5.7 + 2.3;
    const Mixture mixture(test_rng()(), weights);
    for (int64_t blocks = 1; blocks < 60; ++blocks) {
        const int64_t samples = blocks * Mixture::block;
        const auto share = [&](size_t s) {
            return static_cast<int64_t>(weights[s] / sum * static_cast<double>(samples));
        };
        CHECK(mixture.counts_before(samples) ==
              std::vector<int64_t>{0, share(1), samples - share(1) - share(3), share(3)});
    }
}

TEST_CASE("a draw depends on seed, weights and sample alone") {
    const std::vector<double> weights = random_weights(5);
    const uint64_t seed = test_rng()();
    Mixture in_order(seed, weights), jumping(seed, weights), other(seed + 1, weights);
    std::vector<Mixture::Draw> draws;
    for (int64_t g = 0; g < 2 * Mixture::block; ++g) draws.push_back(in_order(g));
    for (int i = 0; i < 50; ++i) {
        const int64_t g = random_int(0, 2 * Mixture::block - 1);
        const Mixture::Draw draw = jumping(g), expected = draws[static_cast<size_t>(g)];
        REQUIRE(draw.source == expected.source);
        REQUIRE(draw.index == expected.index);
    }
    // Only the ratio of weights counts, and turns are shuffled.
    Mixture even(seed, {3, 3}), same(seed, {0.25, 0.25}), others_turns(seed + 1, {3, 3});
    int changes = 0, differences = 0;
    for (int64_t g = 0; g < Mixture::block; ++g) {
        CHECK(even(g).source == same(g).source);
        changes += g > 0 && even(g).source != even(g - 1).source;
        differences += even(g).source != others_turns(g).source;
    }
    // About half of 4096: 10 standard deviations of 32.
    CHECK(std::abs(changes - 2048) < 320);
    CHECK(std::abs(differences - 2048) < 320);
}

TEST_CASE("turns are shuffled otherwise than the windows of a source with the same seed") {
    const uint64_t seed = test_rng()();
    Mixture mixture(seed, {1, 1});
    for (const int64_t block : {int64_t{0}, random_int(1, 1000)}) {
        const Permutation windows(seed, static_cast<uint64_t>(block), Mixture::block);
        int64_t same = 0;
        for (int64_t i = 0; i < Mixture::block; ++i)
            same += (mixture(block * Mixture::block + i).source == 1) ==
                    (windows(i) >= Mixture::block / 2);
        CHECK(std::abs(same - Mixture::block / 2) < 320);  // 10 standard deviations
    }
}

TEST_CASE("invalid weights are refused") {
    for (const std::vector<double>& weights : {std::vector<double>{},
                                               {0.0},
                                               {1, -1},
                                               {1, std::nan("")},
                                               {INFINITY, 1},
                                               std::vector<double>(65, 1.0)})
        CHECK_THROWS_AS(Mixture(1, weights), Error);
    CHECK_NOTHROW(Mixture(1, {1e308, 1e308, 1e-308}));
}
