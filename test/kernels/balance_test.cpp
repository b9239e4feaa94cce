#include "kernels/experts/balance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/experts/route.h"
#include "test/kernels/kernel_test.h"

namespace train_gpt {

namespace {

Tensor matrix(const SharedArray<int32_t>& of, int64_t rows, int64_t cols) {
    return {of.data(), DType::int32, {rows, cols}};
}

SharedArray<int32_t> random_counts(int64_t n, int64_t most) {
    SharedArray<int32_t> counts(static_cast<size_t>(n));
    for (int32_t& count : counts.values()) count = static_cast<int32_t>(random_int(0, most));
    return counts;
}

/// What AdamW makes of a step: it changes nothing in all but the first.
std::vector<StepState> states() {
    std::vector<StepState> all(4);
    all[1].stop = all[2].overflow = all[3].skip = 1;
    return all;
}

}  // namespace

TEST_CASE("a router's counts of micro-batches are added up in integers", "[kernels][cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 5; ++repeat) {
        const int64_t E = random_int(1, 300), S = random_int(1, 5);
        const float unit = std::ldexp(1.0f, static_cast<int>(random_int(0, 20)));
        const auto chosen = random_counts(E, 1000), mass = random_counts(E, 1000);
        const std::vector<int32_t> chosen_before(chosen.values().begin(), chosen.values().end()),
            mass_before(mass.values().begin(), mass.values().end());
        std::vector<double> expected(static_cast<size_t>(E));
        std::vector<int32_t> counted(static_cast<size_t>(E));
        const auto not_finite = random_counts(1, 10);
        int32_t bad = not_finite.values()[0];
        const bool has_capacity = random_int(0, 1) == 0;
        const int64_t capacity = has_capacity ? random_int(1, 100) : 0;
        const auto dropped = random_counts(1, 10);
        int32_t too_many = dropped.values()[0];
        TestStream stream;
        for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
            const auto counts = random_counts(S * E, 100);
            std::vector<float> p(static_cast<size_t>(S * E));
            for (float& value : p) value = static_cast<float>(random_int(0, 1 << 20)) / (1 << 20);
            for (int64_t s = 0; s < S; ++s)
                if (random_int(0, 3) == 0) {
                    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
                    std::fill_n(p.begin() + s * E, E, nan);
                    ++bad;
                }
            const Buffer probabilities(DType::fp32, {S, E}, p);
            count_routes(stream, {.chosen = matrix(chosen, 1, E),
                                  .mass = matrix(mass, 1, E),
                                  .not_finite = matrix(not_finite, 1, 1),
                                  .counts = matrix(counts, S, E),
                                  .probabilities = probabilities,
                                  .unit = unit,
                                  .dropped = has_capacity ? matrix(dropped, 1, 1) : Tensor{},
                                  .capacity = capacity});
            for (const int32_t count : counts.values())
                if (has_capacity && count > capacity)
                    too_many += count - static_cast<int32_t>(capacity);
            for (int64_t i = 0; i < S * E; ++i) {
                const auto e = static_cast<size_t>(i % E);
                counted[e] += counts.values()[static_cast<size_t>(i)];
                if (const double value = p[static_cast<size_t>(i)]; std::isfinite(value))
                    expected[e] += std::floor(value * unit + 0.5);
            }
        }
        CAPTURE(E, S, unit);
        CHECK(not_finite.values()[0] == bad);
        CHECK(dropped.values()[0] == too_many);
        for (size_t e = 0; e < expected.size(); ++e) {
            CHECK(chosen.values()[e] == chosen_before[e] + counted[e]);
            // fp32 rounds p·unit + 0.5, by 2⁻²⁴ of it.
            CHECK(std::abs(mass.values()[e] - mass_before[e] - expected[e]) <= double(S * 3));
        }
    }
}

TEST_CASE("selection biases move towards experts with less than their share, and keep their sum",
          "[kernels][cuda]") {
    ON_EACH_DEVICE();
    for (const StepState& state : states())
        for (const bool is_bf16 : {false, true}) {
            const int64_t E = random_int(2, 300), cut = random_int(1, E - 1);
            const float rate = 0.001f;
            const auto chosen = random_counts(E, 50);
            const std::vector<float> before = random_normal(static_cast<size_t>(E), 0.1f);
            const Buffer master(DType::fp32, {E}, before);
            const Buffer weights(DType::bf16, {E}, std::vector<float>(static_cast<size_t>(E), 7));
            SharedArray<StepState> on_device(1);
            on_device.values()[0] = state;
            // Two ranks' parts
            std::vector<BalanceSegment> segments;
            for (const auto& [first, n] : {std::pair(int64_t{0}, cut), {cut, E - cut}})
                segments.push_back(
                    {.weights = is_bf16 ? weights.tensor().as<bf16>() + first : nullptr,
                     .master = master.tensor().as<float>() + first,
                     .first = first,
                     .n = n,
                     .chosen = chosen.data(),
                     .E = E});
            TestStream stream;
            balance_biases(stream, segments, rate, on_device.data());

            const bool changes = !state.stop && !state.overflow && !state.skip;
            int64_t total = 0;
            for (const int32_t n : chosen.values()) total += n;
            std::vector<double> direction;
            for (const int32_t n : chosen.values())
                direction.push_back(E * n < total ? 1 : E * n > total ? -1 : 0);
            const double mean =
                std::accumulate(direction.begin(), direction.end(), 0.0) / static_cast<double>(E);
            CAPTURE(E, cut, is_bf16, changes);
            for (size_t e = 0; e < direction.size(); ++e) {
                const double expected = before[e] + (changes ? rate * (direction[e] - mean) : 0);
                const float now = master.values()[e];
                CHECK(std::abs(now - expected) <= 1e-7);  // a few roundings of numbers below 1
                if (!changes) CHECK(now == before[e]);
                if (is_bf16 && changes) CHECK(weights.values()[e] == float(bf16(now)));
                if (!is_bf16 || !changes) CHECK(weights.values()[e] == 7);
            }
        }
}

TEST_CASE("the load of a step is kept unless AdamW changes nothing in it", "[kernels][cuda]") {
    ON_EACH_DEVICE();
    for (const StepState& state : states()) {
        const int64_t R = random_int(1, 4), E = random_int(1, 300);
        const auto chosen = random_counts(R * E, 50), last = random_counts(R * E, 50);
        for (int64_t e = 0; e < E; ++e) chosen.values()[static_cast<size_t>(e)] = 0;  // router 0
        const std::vector<int32_t> last_before(last.values().begin(), last.values().end());
        const Buffer load(DType::fp32, {R, E}, random_normal(static_cast<size_t>(R * E)));
        const std::vector<double> load_before = load.values();
        SharedArray<StepState> on_device(1);
        on_device.values()[0] = state;
        TestStream stream;
        keep_load(stream,
                  {.load = load, .last = matrix(last, R, E), .chosen = matrix(chosen, R, E)},
                  on_device.data());
        const bool changes = !state.stop && !state.overflow && !state.skip;
        CAPTURE(R, E, changes);
        for (int64_t r = 0; r < R; ++r) {
            int64_t total = 0;
            for (int64_t e = 0; e < E; ++e)
                total += chosen.values()[static_cast<size_t>(r * E + e)];
            for (int64_t e = 0; e < E; ++e) {
                const auto i = static_cast<size_t>(r * E + e);
                const float share =
                    total == 0 ? 1.0f / static_cast<float>(E)
                               : static_cast<float>(chosen.values()[i]) / static_cast<float>(total);
                CHECK(load.values()[i] == (changes ? share : load_before[i]));
                CHECK(last.values()[i] == (changes ? chosen.values()[i] : last_before[i]));
            }
        }
    }
}

TEST_CASE("the load of sequences is that of the parts that ranks have of them", "[kernels][cuda]") {
    ON_EACH_DEVICE();
    const int64_t S = random_int(1, 4), parts = random_int(1, 4), E = random_int(1, 300);
    const auto counts = random_counts(parts * S * E, 50);
    const Buffer load(DType::fp32, {S, E});
    TestStream stream;
    expert_load(stream, load, matrix(counts, parts * S, E));
    CAPTURE(S, parts, E);
    for (int64_t s = 0; s < S; ++s) {
        std::vector<int64_t> sums(static_cast<size_t>(E));
        int64_t total = 0;
        for (int64_t p = 0; p < parts; ++p)
            for (int64_t e = 0; e < E; ++e) {
                const int32_t n = counts.values()[static_cast<size_t>((p * S + s) * E + e)];
                sums[static_cast<size_t>(e)] += n, total += n;
            }
        for (int64_t e = 0; e < E; ++e)
            CHECK(load.values()[static_cast<size_t>(s * E + e)] ==
                  (total == 0 ? 1.0f / static_cast<float>(E)
                              : static_cast<float>(sums[static_cast<size_t>(e)]) /
                                    static_cast<float>(total)));
    }
}

}  // namespace train_gpt
