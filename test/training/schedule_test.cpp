#include "training/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"

using namespace train_gpt;

namespace {

/// A random schedule with `total` steps, some of them warm-up.
Config random_schedule(const std::string& decay, int64_t total) {
    Config config;
    config.optimizer.learning_rate = std::uniform_real_distribution<double>(1e-5, 1e-1)(test_rng());
    config.schedule.final_fraction = std::uniform_real_distribution<double>(0.0, 0.9)(test_rng());
    config.schedule.decay_fraction = std::uniform_real_distribution<double>(0.01, 0.5)(test_rng());
    config.schedule.warmup_steps = random_int(0, total / 3);
    config.schedule.decay = decay;
    config.schedule.steps = total;
    return config;
}

}  // namespace

TEST_CASE("warm-up rises linearly and its last step has exactly the peak rate", "[schedule]") {
    for (const char* decay : {"cosine", "linear", "constant", "wsd"}) {
        const int64_t total = random_int(30, 5000);
        Config config = random_schedule(decay, total);
        const int64_t warmup = config.schedule.warmup_steps = random_int(1, total);
        const double peak = config.optimizer.learning_rate;
        CAPTURE(decay, total, warmup, peak);
        for (int64_t step = 0; step < warmup; ++step) {
            const double expected =
                peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
            CHECK(std::abs(learning_rate(config, step, total) - expected) <= 1e-15 * peak);
        }
        CHECK(learning_rate(config, warmup - 1, total) == peak);
    }
}

TEST_CASE("cosine, linear and wsd end at exactly the final rate and never rise after the peak",
          "[schedule]") {
    for (const char* decay : {"cosine", "linear", "wsd"}) {
        for (int trial = 0; trial < 20; ++trial) {
            const int64_t total = random_int(2, 3000);
            const Config config = random_schedule(decay, total);
            const int64_t peak_step = std::max<int64_t>(config.schedule.warmup_steps - 1, 0);
            const double peak = config.optimizer.learning_rate,
                         final_rate = peak * config.schedule.final_fraction;
            CAPTURE(decay, total, peak_step, peak, config.schedule.final_fraction,
                    config.schedule.decay_fraction);
            REQUIRE(learning_rate(config, peak_step, total) == peak);
            REQUIRE(learning_rate(config, total - 1, total) == final_rate);
            REQUIRE(learning_rate(config, total, total) == final_rate);
            REQUIRE(learning_rate(config, total + 1000, total) == final_rate);
            for (int64_t step = peak_step + 1; step < total; ++step) {
                const double rate = learning_rate(config, step, total),
                             before = learning_rate(config, step - 1, total);
                REQUIRE(rate <= before);
                if (step < total - 1) REQUIRE(rate > final_rate);
            }
        }
    }
}

TEST_CASE("cosine and linear have their formula's value between the ends", "[schedule]") {
    const int64_t total = random_int(10, 3000);
    for (const char* decay : {"cosine", "linear"}) {
        const Config config = random_schedule(decay, total);
        const int64_t warmup = config.schedule.warmup_steps, first = warmup > 0 ? warmup - 1 : 0;
        const double peak = config.optimizer.learning_rate,
                     low = peak * config.schedule.final_fraction;
        CAPTURE(decay, total, warmup);
        for (int64_t step = warmup; step < total; ++step) {
            const double x =
                static_cast<double>(step - first) / static_cast<double>(total - 1 - first);
            const double shape = decay[0] == 'c' ? std::cos(std::numbers::pi * x / 2) *
                                                       std::cos(std::numbers::pi * x / 2)
                                                 : 1 - x;
            REQUIRE(std::abs(learning_rate(config, step, total) - (low + (peak - low) * shape)) <
                    1e-14 * peak);
        }
    }
}

TEST_CASE("wsd stays at the peak until its last share of the steps", "[schedule]") {
    Config config = random_schedule("wsd", 1000);
    config.schedule.warmup_steps = 100;
    config.schedule.decay_fraction = 0.2;
    config.schedule.final_fraction = 0;
    const double peak = config.optimizer.learning_rate;
    for (int64_t step = 99; step <= 799; ++step) REQUIRE(learning_rate(config, step, 1000) == peak);
    for (int64_t step = 800; step < 1000; ++step)
        REQUIRE(std::abs(learning_rate(config, step, 1000) -
                         peak * static_cast<double>(999 - step) / 200) < 1e-14 * peak);
    config.schedule.decay_fraction = 1;  // the decay never reaches into the warm-up
    for (int64_t step = 0; step < 100; ++step)
        REQUIRE(learning_rate(config, step, 1000) <= learning_rate(config, 99, 1000));
    CHECK(learning_rate(config, 99, 1000) == peak);
    CHECK(learning_rate(config, 100, 1000) < peak);
    CHECK(learning_rate(config, 999, 1000) == 0);
    config.schedule.decay_fraction = 1e-9;
    CHECK(learning_rate(config, 998, 1000) == peak);
    CHECK(learning_rate(config, 999, 1000) == 0);
}

TEST_CASE("a run of one step or of warm-up alone ends at the peak rate", "[schedule]") {
    for (const char* decay : {"cosine", "linear", "constant", "wsd"}) {
        Config config = random_schedule(decay, 1);
        config.schedule.warmup_steps = 0;
        CHECK(learning_rate(config, 0, 1) == config.optimizer.learning_rate);
        config.schedule.warmup_steps = 7;
        CHECK(learning_rate(config, 6, 7) == config.optimizer.learning_rate);
        CHECK(std::isfinite(learning_rate(config, 7, 7)));
    }
}

TEST_CASE("the length of a run follows from steps, tokens or epochs, rounded up", "[schedule]") {
    Config config;
    config.batch.tokens_per_step = 1000;
    config.schedule.steps = 17;
    CHECK(total_steps(config, 0) == 17);
    config.schedule.steps = 0;
    config.schedule.tokens = 5000;
    CHECK(total_steps(config, 0) == 5);
    config.schedule.tokens = 5001;
    CHECK(total_steps(config, 0) == 6);
    config.schedule.tokens = 1;
    CHECK(total_steps(config, 0) == 1);
    config.schedule.tokens = 0;
    config.schedule.epochs = 2.5;
    CHECK(total_steps(config, 10000) == 25);
    CHECK(total_steps(config, 10001) == 26);
    config.schedule.warmup_steps = 26;
    CHECK(total_steps(config, 10001) == 26);
    CHECK_THROWS_AS(total_steps(config, 10000), Error);
    CHECK_THROWS_AS(total_steps(config, 0), Error);
    config.schedule.warmup_steps = 0;
    config.schedule.epochs = 1e6;
    CHECK_THROWS_AS(total_steps(config, int64_t{1} << 62), Error);
}
