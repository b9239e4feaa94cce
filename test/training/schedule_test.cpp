#include "training/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

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

TEST_CASE("the steps of a batch warm-up have the tokens that the formula says, also after a resume",
          "[schedule]") {
    Config config;
    auto& batch = config.batch;
    const int64_t most = random_int(1, 40);
    batch.warmup_tokens_per_step = random_int(1, 100);
    batch.tokens_per_step = most * batch.warmup_tokens_per_step;
    batch.warmup_tokens = random_int(1, 20 * batch.tokens_per_step);
    CAPTURE(most, batch.warmup_tokens_per_step, batch.warmup_tokens);
    TokenCount tokens;
    plan_steps(tokens, 0, config);
    std::vector<int64_t> sizes;
    int64_t read = 0;
    while (read < batch.warmup_tokens + 3 * batch.tokens_per_step) {
        const int64_t k = std::min(most, 1 + (most - 1) * read / batch.warmup_tokens);
        sizes.push_back(k * batch.warmup_tokens_per_step);
        REQUIRE(tokens.before(std::ssize(sizes) - 1) == read);
        REQUIRE(tokens.of_step(std::ssize(sizes) - 1) == sizes.back());
        read += sizes.back();
    }
    CHECK(tokens.of_step(std::ssize(sizes) + random_int(0, 1000)) == batch.tokens_per_step);

    // A checkpoint keeps the steps that were done.
    const int64_t at = random_int(0, std::ssize(sizes) - 1);
    TokenCount resumed(sizes[0]);
    for (int64_t step = 0; step < at; ++step)
        resumed.change(step, sizes[static_cast<size_t>(step)]);
    plan_steps(resumed, at, config);
    for (int64_t step = 0; step < std::ssize(sizes); ++step)
        REQUIRE(resumed.of_step(step) == sizes[static_cast<size_t>(step)]);

    // The run's length in tokens
    config.schedule.tokens = random_int(1, read);
    int64_t steps = 0;
    for (int64_t sum = 0; sum < config.schedule.tokens; ++steps)
        sum += sizes[static_cast<size_t>(steps)];
    CHECK(total_steps(config, 0) == steps);
}

TEST_CASE("wsd decays over schedule.decay_steps if they are set", "[schedule]") {
    const int64_t total = random_int(2, 3000), steps = random_int(1, total - 1);
    Config config = random_schedule("wsd", total);
    config.schedule.warmup_steps = 0;
    config.schedule.decay_steps = steps;
    const double peak = config.optimizer.learning_rate, last = config.schedule.final_fraction;
    CAPTURE(total, steps, peak, last);
    for (int64_t step = 0; step < total; ++step) {
        const int64_t into = std::max<int64_t>(0, step - (total - 1 - steps));
        const double share = static_cast<double>(into) / static_cast<double>(steps);
        REQUIRE(learning_rate(config, step, total) ==
                Approx(peak * (1 - (1 - last) * share)).epsilon(1e-12));
    }
}

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

namespace {

/// A run of `tokens` whose batch changed at some steps, the last time before it resumes.
TokenCount random_batches(int64_t tokens) {
    TokenCount count(random_int(1, 1 + tokens / 20));
    for (int64_t step = 0, parts = random_int(1, 4); parts > 0; --parts) {
        step += random_int(1, 5);
        count.change(step, random_int(1, 1 + tokens / 20));
    }
    return count;
}

}  // namespace

TEST_CASE("a run whose batch changes ends in the step that reaches its tokens", "[schedule]") {
    for (int trial = 0; trial < 200; ++trial) {
        Config config;
        const int64_t wanted = random_int(1, 5000);
        const bool epochs = random_int(0, 1) == 1;
        if (epochs)
            config.schedule.epochs = 2;
        else
            config.schedule.tokens = 2 * wanted;
        const TokenCount tokens = random_batches(2 * wanted);
        const int64_t resumes = tokens.parts().back().first_step;
        int64_t steps = resumes;  // no step follows if the tokens are reached already
        while (tokens.before(steps) < 2 * wanted) ++steps;
        CAPTURE(wanted, epochs);
        CHECK(total_steps(config, wanted, tokens) == steps);

        const Schedule schedule(config, wanted, {.step = resumes, .tokens = tokens});
        CHECK(schedule.steps() == steps);
        CHECK(schedule.tokens() == 2 * wanted);
        CHECK(schedule.position(steps).tokens.before(steps) == schedule.tokens_before(steps));
    }
}

TEST_CASE("a schedule in tokens falls with the tokens, whatever the batch", "[schedule]") {
    for (const char* decay : {"cosine", "linear", "wsd"})
        for (int trial = 0; trial < 50; ++trial) {
            const int64_t wanted = random_int(100, 100000);
            Config config = random_schedule(decay, 1);
            config.schedule.steps = 0;
            config.schedule.tokens = wanted;
            config.schedule.warmup_steps = random_int(0, 4);
            const TokenCount tokens = random_batches(wanted);
            const int64_t total = total_steps(config, 0, tokens),
                          peak = std::max<int64_t>(config.schedule.warmup_steps - 1, 0);
            if (total < 2 + config.schedule.warmup_steps) continue;
            const double high = config.optimizer.learning_rate,
                         low = high * config.schedule.final_fraction;
            // The decay's first and last tokens.
            double from = static_cast<double>(tokens.before(peak));
            const auto to = static_cast<double>(tokens.before(total - 1));
            const auto batch = static_cast<double>(tokens.per_step());
            if (decay[0] == 'w') {
                const double length = static_cast<double>(tokens.before(total)) / batch;
                const double steps = std::max<double>(
                    1, static_cast<double>(std::llround(config.schedule.decay_fraction * length)));
                from = std::max(from, to - steps * batch);
            }
            for (int64_t step = config.schedule.warmup_steps; step < total; ++step) {
                const double x = std::clamp(
                    (static_cast<double>(tokens.before(step)) - from) / (to - from), 0.0, 1.0);
                const double share =
                    decay[0] == 'c' ? (1 + std::cos(std::numbers::pi * x)) / 2 : 1 - x;
                CAPTURE(decay, step, total, x);
                REQUIRE(std::abs(learning_rate(config, step, total, tokens) -
                                 (low + (high - low) * share)) <= 1e-12 * high);
            }
        }
}

TEST_CASE("a schedule in steps, and one in tokens of equal steps, do not depend on the batch",
          "[schedule]") {
    for (const char* decay : {"cosine", "linear", "wsd", "constant"}) {
        const int64_t total = random_int(1, 3000);
        Config config = random_schedule(decay, total);
        const TokenCount batches = random_batches(1000), equal(random_int(1, int64_t{1} << 32));
        for (int64_t step = 0; step < total; ++step)
            REQUIRE(learning_rate(config, step, total, batches) ==
                    learning_rate(config, step, total));
        config.schedule.steps = 0;
        config.schedule.tokens = total * equal.per_step() - random_int(0, equal.per_step() - 1);
        CHECK(total_steps(config, 0, equal) == total);
        for (int64_t step = 0; step < total; ++step)
            REQUIRE(learning_rate(config, step, total, equal) ==
                    learning_rate(config, step, total));
    }
}

TEST_CASE("a run may resume with steps so large that its warm-up would not have fitted",
          "[schedule]") {
    Config config;
    config.schedule.tokens = 2000;
    config.schedule.warmup_steps = 10;
    TokenCount tokens(10);
    tokens.change(100, 500);  // 1,000 tokens are done
    CHECK(total_steps(config, 0, tokens) == 102);
    config.batch.tokens_per_step = 500;
    CHECK_THROWS_AS(total_steps(config, 0), Error);
}
