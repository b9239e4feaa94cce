// What a sweep makes of its arguments and of its runs' losses, compared with plain loops.
#include "training/sweep/sweep.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/sweep/summary.h"

using namespace train_gpt;
using State = SweptRun::State;

TEST_CASE("--vary takes every kind of value, once each, and sorts numbers", "[sweep]") {
    const auto keys =
        varied_keys({"optimizer.learning_rate=4e-3,0.0005,1e-3", "precision.dtype=fp32,auto",
                     R"(parallel.layers_per_stage=[1,2],[2,1])", "data.val=a,b\\\"c,\"d,e\""});
    REQUIRE(keys.size() == 4);
    CHECK(keys[0].values == std::vector<std::string>{"0.0005", "0.001", "0.004"});
    CHECK(keys[0].is_number);
    CHECK(keys[1].values == std::vector<std::string>{"\"fp32\"", "\"auto\""});
    CHECK_FALSE(keys[1].is_number);
    CHECK(keys[2].values == std::vector<std::string>{"[1,2]", "[2,1]"});
    CHECK(varied_keys({"data.val=a,\"d,e\""})[0].values ==
          std::vector<std::string>{"\"a\"", "\"d,e\""});
    CHECK(combinations_of(keys).size() == 3u * 2 * 2 * keys[3].values.size());

    const auto refused = [](const std::vector<std::string>& arguments) {
        try {
            varied_keys(arguments);
        } catch (const Error& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    CHECK(contains(refused({"optimizer.learning_rat=1"}),
                   "the nearest valid key is \"optimizer.learning_rate\""));
    CHECK(contains(refused({"optimizer.beta1=0.9,2"}), "--vary optimizer.beta1=2"));
    CHECK(contains(refused({"optimizer.beta1=0.9,9e-1"}), "comes twice"));
    CHECK(contains(refused({"optimizer.beta1=0.9", "optimizer.beta1=0.8"}), "varied twice"));
    CHECK(contains(refused({"optimizer.beta1"}), "write --vary section.key=value"));
    CHECK(contains(refused({"optimizer.beta1=0.9,,0.8"}), "is not valid"));
    CHECK(contains(refused({"seed=1,2"}), "--seeds"));
    CHECK(contains(refused({"run_dir=a,b"}), "--set"));
    CHECK(contains(refused({"optimizer=1"}), "is a section"));
}

TEST_CASE("runs of a sweep have names of their own that do not depend on the other values",
          "[sweep]") {
    const auto few = varied_keys({"data.val=a/b,a_b,a b"});
    const auto more = varied_keys(
        {"data.val=a_b,zz,a b,a/b," + std::string(300, 'x') + "," + std::string(301, 'x')});
    std::set<std::string> names;
    std::map<std::vector<std::string>, std::string> by_values;
    for (const Combination& combination : combinations_of(more))
        for (const uint64_t seed : {1u, 12u}) {
            const std::string name = run_name(more, combination, seed);
            CHECK(name.size() < 255);
            CHECK(name.find('/') == std::string::npos);
            names.insert(name);
            if (seed == 1) by_values[combination.values] = name;
        }
    CHECK(names.size() == 12);
    for (const Combination& combination : combinations_of(few))
        CHECK(run_name(few, combination, 1) == by_values.at(combination.values));
    CHECK(run_name(varied_keys({"optimizer.learning_rate=2e-3"}),
                   {.values = {"0.002"}, .overrides = {}},
                   7) == "optimizer.learning_rate=0.002,seed=7");
}

namespace {

void check_random_summary() {
    std::vector<VariedKey> keys{{.key = "a", .values = {}, .is_number = true},
                                {.key = "b", .values = {"\"x\"", "\"y\""}, .is_number = false}};
    const int64_t n = random_int(1, 5);
    for (int64_t v = 0; v < n; ++v) keys[0].values.push_back(std::to_string(v));
    const auto combinations = combinations_of(keys);
    const int seeds = static_cast<int>(random_int(1, 4));
    std::vector<SweptRun> runs;
    std::vector<std::vector<double>> losses(combinations.size());
    std::vector<bool> complete(combinations.size(), true);
    for (size_t c = 0; c < combinations.size(); ++c)
        for (int s = 0; s < seeds; ++s) {
            SweptRun run{.name = "", .combination = c, .seed = static_cast<uint64_t>(s)};
            run.state = random_int(0, 7) == 0 ? State::failed : State::finished;
            if (run.state == State::finished)
                losses[c].push_back(run.loss = 3 + random_normal(1)[0]);
            else
                complete[c] = false;
            runs.push_back(run);
        }
    std::shuffle(runs.begin(), runs.end(), test_rng());
    const SweepSummary summary = summarize(Measure::val_loss, keys, combinations, runs);

    REQUIRE(summary.rows.size() == combinations.size());
    double lowest = HUGE_VAL;
    std::map<std::string, double> best_with;
    for (const auto& row : summary.rows) {
        const std::vector<double>& of = losses[row.combination];
        CHECK(row.complete() == complete[row.combination]);
        CHECK(row.finished == static_cast<int>(of.size()));
        if (of.empty()) continue;
        double mean = 0, square = 0;
        for (const double loss : of) mean += loss / static_cast<double>(of.size());
        for (const double loss : of) square += loss * loss;
        CHECK(row.mean == Approx(mean));
        if (of.size() == 1) {
            CHECK(std::isnan(row.spread));
        } else {
            const auto count = static_cast<double>(of.size());
            CHECK(row.spread ==
                  Approx(std::sqrt(std::max(0.0, (square - count * mean * mean) / (count - 1))))
                      .margin(1e-6));
        }
        if (!complete[row.combination]) continue;
        lowest = std::min(lowest, mean);
        for (const std::string& value : combinations[row.combination].values) {
            const auto known = best_with.try_emplace(value, mean).first;
            known->second = std::min(known->second, mean);
        }
    }
    CHECK((summary.best() != nullptr) == (lowest < HUGE_VAL));
    if (summary.best()) CHECK(summary.best()->mean == Approx(lowest));
    for (size_t k = 0; k < keys.size(); ++k) {
        const SweepSummary::Key& result = summary.key_results[k];
        for (size_t v = 0; v < keys[k].values.size(); ++v) {
            const auto expected = best_with.find(keys[k].values[v]);
            REQUIRE(result.best_with[v].has_value() == (expected != best_with.end()));
            if (result.best_with[v])
                CHECK(summary.rows[*result.best_with[v]].mean == Approx(expected->second));
        }
        if (!summary.best()) continue;
        REQUIRE(result.best);
        CHECK(best_with.at(keys[k].values[*result.best]) == Approx(lowest));
        CHECK(result.at_low_edge == (k == 0 && n > 1 && *result.best == 0));
        CHECK(result.at_high_edge ==
              (k == 0 && n > 1 && *result.best == static_cast<size_t>(n - 1)));
    }
}

}  // namespace

TEST_CASE(
    "a sweep's summary has the mean and spread of each combination and the best of each value",
    "[sweep]") {
    for (int trial = 0; trial < 30; ++trial) check_random_summary();
}

TEST_CASE("halving points are a quarter and half of a run, and never its first step", "[sweep]") {
    CHECK(halving_points(0, 400) == std::vector<int64_t>{100, 200});
    CHECK(halving_points(0, 1) == std::vector<int64_t>{1, 1});
    CHECK(halving_points(1000, 1400) == std::vector<int64_t>{1100, 1200});  // decays from 1000
    CHECK(halving_points(1000, 1001) == std::vector<int64_t>{1001, 1001});
}
