// What a run says at its end of where the time of its steps went.
#include "training/watch/step_accounting.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/formatted.h"
#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

StepTimes times_of(double compute, double data, double shard = 0, double tensor = 0) {
    StepTimes times;
    times[StepPhase::compute] = compute;
    times[StepPhase::data] = data;
    times[StepPhase::communication] = shard + tensor;
    if (shard + tensor > 0) times.exposed = {{"shard", shard}, {"tensor", tensor}};
    return times;
}

}  // namespace

TEST_CASE("the first two steps of a process are warm-up, the others count", "[step_accounting]") {
    const World world;
    StepAccounting accounting;
    for (int step = 0; step < 2; ++step) {
        accounting.add(times_of(1, 99));
        CHECK(accounting.summary(world).empty());
    }
    accounting.add(times_of(3, 1));
    CHECK(contains(accounting.summary(world), "time of a step: compute 75.0%"));
    accounting.add(times_of(1, 1, 1, 1));
    CHECK(accounting.summary(world) ==
          "time of a step: compute 50.0%, communication 25.0% (shard 12.5%, tensor 12.5%), data "
          "wait 25.0%, optimizer 0.0%");
}

TEST_CASE("a rank that is alone says nothing about communication", "[step_accounting]") {
    StepAccounting accounting;
    for (int step = 0; step < 3; ++step) accounting.add(times_of(3, 1));
    CHECK(accounting.summary(World{}) ==
          "time of a step: compute 75.0%, data wait 25.0%, optimizer 0.0%");
}

TEST_CASE("a single group of ranks is not named in the time of communication",
          "[step_accounting]") {
    StepAccounting accounting;
    for (int step = 0; step < 3; ++step) {
        StepTimes times = times_of(3, 0);
        times[StepPhase::communication] = 1;
        times.exposed = {{"data", 1}};
        accounting.add(times);
    }
    CHECK(accounting.summary(World{}) ==
          "time of a step: compute 75.0%, communication 25.0%, data wait 0.0%, optimizer 0.0%");
}

TEST_CASE("ranks: step accounting", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    // Random seconds, the same on all ranks: each takes its own.
    std::vector<double> compute;
    for (int rank = 0; rank < world.size(); ++rank)
        compute.push_back(static_cast<double>(random_int(100, 999)));
    const auto slowest = std::ranges::max_element(compute) - compute.begin();
    StepAccounting accounting;
    for (int step = 0; step < 3; ++step)
        accounting.add(times_of(compute[static_cast<size_t>(world.rank())], 1));
    const std::string summary = accounting.summary(world);

    std::vector<double> sorted = compute;
    std::ranges::sort(sorted);
    const size_t n = sorted.size();
    const double median = n % 2 == 1 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
    CAPTURE(compute, summary);
    if (sorted[n - 1] > sorted[n - 2]) CHECK(contains(summary, concat("; rank ", slowest, " (")));
    CHECK(contains(summary, formatted("computes longest, %.1f%% more than the median",
                                      100 * (sorted[n - 1] / median - 1))));
}

TEST_CASE("the rank that computes longest is compared with the median of all",
          "[step_accounting]") {
    for (const int ranks : {2, 3, 4}) check_case_on_ranks(ranks, "ranks: step accounting");
}
