// Where a run is in its data.
#include "training/files/position.h"

#include <limits>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

TEST_CASE("tokens before a step are the sum of the steps before it, however often they change",
          "[position]") {
    for (int trial = 0; trial < 50; ++trial) {
        std::vector<int64_t> per_step(60, random_int(1, 1000));  // of each step
        TokenCount tokens(per_step[0]);
        for (int64_t changes = random_int(0, 6); changes > 0; --changes) {
            // Also to an earlier step than the last change, as from an older checkpoint.
            const int64_t step = random_int(0, 59);
            const int64_t size = random_int(0, 2) ? random_int(1, 1000) : tokens.per_step();
            tokens.change(step, size);
            std::fill(per_step.begin() + step, per_step.end(), size);
        }
        int64_t sum = 0;
        for (int64_t step = 0; step < 60; ++step) {
            REQUIRE(tokens.before(step) == sum);
            sum += per_step[static_cast<size_t>(step)];
        }
        CHECK(tokens.per_step() == per_step.back());
        // Parts differ from their neighbours.
        for (size_t i = 1; i < tokens.parts().size(); ++i) {
            CHECK(tokens.parts()[i].first_step > tokens.parts()[i - 1].first_step);
            CHECK(tokens.parts()[i].per_step != tokens.parts()[i - 1].per_step);
        }
    }
}

TEST_CASE("a checkpoint gives back its position, and one without it that of its batch",
          "[position]") {
    const TemporaryDirectory directory;
    Config config;
    config.seed = test_rng()();
    config.batch.sequence_length = static_cast<int>(random_int(1, 64));
    const int64_t T = config.batch.sequence_length, step = random_int(1, 50);
    config.batch.tokens_per_step = T * random_int(1, 9);

    const RunPosition old = read_position(directory.path(), step, config);
    CHECK(old.step == step);
    CHECK(old.tokens.before(step) == step * config.batch.tokens_per_step);
    CHECK(old.order.seed == config.seed);
    CHECK(old.order.sample_after(old.tokens.before(step)) ==
          step * config.batch.tokens_per_step / T);

    RunPosition position = old;
    position.tokens.change(random_int(0, step), T * random_int(1, 9));
    position.order = {.seed = test_rng()(),
                      .T = static_cast<int>(T),
                      .sources = {{"5 shards", 0.1}, {"a shard", 1e-3}},
                      .first_token = 0,
                      .tokens_before = {{"a\"b", random_int(0, 1 << 30)}}};
    write_position(directory.path(), position);
    const RunPosition read_back = read_position(directory.path(), step, Config{});
    CHECK(read_back.step == step);
    CHECK(read_back.tokens.parts() == position.tokens.parts());
    CHECK(read_back.order.seed == position.order.seed);
    CHECK(read_back.order.T == T);
    CHECK(read_back.order.has_sources_of(position.order));
    CHECK_FALSE(read_back.order.has_sources_of({.sources = {{"5 shards", 0.1}, {"b", 1e-3}}}));
    CHECK_FALSE(
        read_back.order.has_sources_of({.sources = {{"5 shards", 0.1}, {"a shard", 2e-3}}}));
    CHECK(read_back.order.has_sources_of({.sources = {{"5 shards", 300.0}, {"a shard", 3.0}}}));
    CHECK(read_back.order.tokens_before == position.order.tokens_before);

    // Of another step, its numbers contradict each other.
    const std::string error = error_of([&] { read_position(directory.path(), step + 1, config); });
    CHECK(contains(error, "position.json contradicts itself"));
    // Numbers that cannot be are refused, too.
    const nlohmann::json whole = nlohmann::json::parse(read(directory / "position.json"));
    for (const char* key : {"/steps/0/first_step", "/steps/0/tokens_per_step", "/order/first_token",
                            "/order/sequence_length", "/samples", "/tokens"})
        for (const int64_t value : {int64_t{-1}, std::numeric_limits<int64_t>::min(),
                                    std::numeric_limits<int64_t>::max()}) {
            CAPTURE(key, value);
            nlohmann::json damaged = whole;
            damaged[nlohmann::json::json_pointer(key)] = value;
            write(directory / "position.json", damaged.dump());
            CHECK_THROWS_AS(read_position(directory.path(), step, config), Error);
        }
    write(directory / "position.json", "{}");
    CHECK(contains(error_of([&] { read_position(directory.path(), step, config); }),
                   "position.json has no valid \"steps\""));
}

TEST_CASE("an order that begins later is another one, even with seed and data of the first",
          "[position]") {
    DataOrder order{.seed = test_rng()()};
    CHECK(order.key() == order.seed);
    const DataOrder later{.seed = order.seed, .first_token = random_int(1, int64_t{1} << 50)};
    CHECK(later.key() != order.seed);
}
