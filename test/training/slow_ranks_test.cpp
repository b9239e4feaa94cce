// Ranks that make the others wait.
#include "training/watch/slow_ranks.h"

#include <algorithm>
#include <vector>

#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

double random_real(double low, double high) {
    return low + (high - low) * static_cast<double>(random_int(0, 1000)) / 1000;
}

/// A rank whose own work takes so many seconds; it waits for the rest of the steps.
MeasuredWork work_of(double own, double steps, int64_t micro_batches = 50, int stage = 0) {
    MeasuredWork work{.host = "h", .times = {}, .micro_batches = micro_batches, .stage = stage};
    const double compute = own * random_real(0.2, 0.9);
    work.times[StepPhase::compute] = compute;
    work.times[StepPhase::data] = (own - compute) * 0.75;
    work.times[StepPhase::optimizer] = (own - compute) * 0.25;
    work.times[StepPhase::communication] = steps - own;
    return work;
}

}  // namespace

TEST_CASE("a rank is slow if its own work takes more than half longer than the others'",
          "[slow_ranks]") {
    for (int i = 0; i < 200; ++i) {
        const auto n = static_cast<size_t>(random_int(2, 9));
        const auto slow = static_cast<size_t>(random_int(0, static_cast<int64_t>(n) - 1));
        const double usual = random_real(1, 10), ratio = random_real(1.05, 3);
        std::vector<MeasuredWork> ranks;
        for (size_t rank = 0; rank < n; ++rank)
            ranks.push_back(work_of(rank == slow ? ratio * usual : usual, 3 * usual));
        const std::vector<SlowWork> found = find_slow_work(ranks);
        CAPTURE(n, slow, ratio);
        REQUIRE(found.size() == (ratio > 1.5 + 1e-9 ? 1U : 0U));
        if (found.empty()) continue;
        CHECK(found[0].rank == static_cast<int>(slow));
        CHECK(found[0].ratio == Approx(ratio));
    }
}

TEST_CASE("more micro-batches, another stage, and noise in short steps make no rank slow",
          "[slow_ranks]") {
    // Twice the micro-batches, in twice the time
    CHECK(find_slow_work(std::vector{work_of(2, 3, 100), work_of(1, 3), work_of(1, 3)}).empty());
    CHECK(find_slow_work(std::vector{work_of(2, 3), work_of(1, 3), work_of(1, 3)}).size() == 1);
    // The head's stage
    CHECK(find_slow_work(std::vector{work_of(1, 3, 50, 0), work_of(1, 3, 50, 0),
                                     work_of(2, 3, 50, 1), work_of(2, 3, 50, 1)})
              .empty());
    // Twice as long, but a hundredth of the step
    CHECK(find_slow_work(std::vector{work_of(2, 200), work_of(1, 200), work_of(1, 200)}).empty());
    CHECK(find_slow_work(std::vector{work_of(1, 1)}).empty());
}

TEST_CASE("ranks: slow ranks", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    SlowWorkWatch watch;
    std::vector<size_t> lines;
    for (int64_t step = 1; step <= 4 * SlowWorkWatch::steps; ++step) {
        // Rank 1 is slow in the first, second and fourth fifty steps.
        const int64_t window = (step - 1) / SlowWorkWatch::steps;
        StepTimes times;
        times[StepPhase::compute] = world.rank() == 1 && window != 2 ? 2 : 1;
        times[StepPhase::data] = 0.5;
        times[StepPhase::communication] = 1;
        watch.add(times, 1);
        REQUIRE(watch.is_due() == (step % SlowWorkWatch::steps == 0));
        if (!watch.is_due()) continue;
        const std::vector<std::string> said = watch.take(step, world, 0);
        lines.push_back(said.size());
        if (step != SlowWorkWatch::steps) continue;
        REQUIRE(said.size() == 1);
        CHECK(contains(said[0], "rank 1 (host " + world.host() +
                                    ") is slow: in steps 1 to 50 its own work took 1.7 times"));
        CHECK(contains(said[0],
                       "its time: compute 57%, data wait 14%, optimizer 0%, communication 29%"));
    }
    CHECK(lines == std::vector<size_t>{1, 0, 0, 1});
}

TEST_CASE("a slow rank is named when it becomes slow, with where its time goes", "[slow_ranks]") {
    check_case_on_ranks(3, "ranks: slow ranks");
}
