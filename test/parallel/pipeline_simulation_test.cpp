#include "parallel/pipeline/pipeline_simulation.h"

#include <algorithm>

#include "test/catch.h"
#include "test/parallel/peak_slots.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

using Work = PipelineWork;

PipelineTimes same_times(const PipelineSchedule& schedule, double F, double I, double W,
                         double send = 0) {
    return {.stages = std::vector<StageTimes>(static_cast<size_t>(schedule.stages), {F, I, W}),
            .send = send};
}

/// The place of an action in a rank's list.
auto find(PipelineSchedule& schedule, size_t rank, Work work, int micro_batch) {
    auto& actions = schedule.ranks[rank].actions;
    return std::find_if(actions.begin(), actions.end(), [&](const PipelineAction& a) {
        return a.work == work && a.micro_batch == micro_batch;
    });
}

std::string refusal(const PipelineSchedule& schedule, PipelineTransport transport) {
    return error_of([&] { simulate(schedule, same_times(schedule, 1, 1, 1), transport); });
}

}  // namespace

TEST_CASE("a simulated pipeline starts each compute when its rank and its message are there",
          "[pipeline_simulation]") {
    const PipelineSchedule schedule = pipeline_schedule({PipelineKind::one_f_one_b, 2, 1, 2});
    const PipelineTimes times{.stages = {{3, 4, 2}, {5, 6, 1}}, .send = 0.5};
    const PipelineTimeline timeline = simulate(schedule, times);
    struct Expected {
        Work work;
        int micro_batch;
        double start, end;
    };
    const std::vector<std::vector<Expected>> expected{{{Work::forward, 0, 0, 3},
                                                       {Work::forward, 1, 3, 6},
                                                       {Work::backward, 0, 16, 22},
                                                       {Work::backward, 1, 28, 34}},
                                                      {{Work::forward, 0, 3.5, 8.5},
                                                       {Work::backward, 0, 8.5, 15.5},
                                                       {Work::forward, 1, 15.5, 20.5},
                                                       {Work::backward, 1, 20.5, 27.5}}};
    for (size_t rank = 0; rank < 2; ++rank) {
        REQUIRE(timeline.computes[rank].size() == expected[rank].size());
        for (size_t i = 0; i < expected[rank].size(); ++i) {
            const TimedAction& timed = timeline.computes[rank][i];
            CHECK(timed.action.work == expected[rank][i].work);
            CHECK(timed.action.micro_batch == expected[rank][i].micro_batch);
            CHECK(timed.start == expected[rank][i].start);
            CHECK(timed.end == expected[rank][i].end);
        }
    }
    CHECK(timeline.makespan == 34);
    CHECK(timeline.idle == std::vector<double>{16, 10});
    CHECK(timeline.idle_share() == Approx(26.0 / 68));
    CHECK(peak_slots(timeline, 2) == std::vector<int>{2, 1});
}

TEST_CASE("sends that wait keep both ranks busy", "[pipeline_simulation]") {
    const PipelineSchedule schedule = pipeline_schedule({PipelineKind::gpipe, 2, 1, 1});
    CHECK(simulate(schedule, same_times(schedule, 1, 1, 1, 10), PipelineTransport::blocking)
              .makespan == 1 + 10 + 3 + 10 + 2);
    // Rank 0 could compute a second forward while the first one is sent, but waits.
    const PipelineSchedule two = pipeline_schedule({PipelineKind::gpipe, 2, 1, 2});
    const auto second_forward = [&](PipelineTransport transport) {
        return simulate(two, same_times(two, 1, 1, 1, 10), transport).computes[0][1].start;
    };
    CHECK(second_forward(PipelineTransport::buffered) == 1);
    CHECK(second_forward(PipelineTransport::blocking) == 11);
}

TEST_CASE("messages of one link follow each other", "[pipeline_simulation]") {
    const PipelineSchedule schedule = pipeline_schedule({PipelineKind::gpipe, 2, 1, 3});
    const PipelineTimeline timeline = simulate(schedule, same_times(schedule, 1, 1, 1, 10));
    for (size_t i = 0; i < 3; ++i)
        CHECK(timeline.computes[1][i].start == 1 + 10 * static_cast<double>(i + 1));
}

TEST_CASE("a simulated pipeline without a send, or with sends that wait for each other, deadlocks",
          "[pipeline_simulation]") {
    const auto both = {PipelineTransport::buffered, PipelineTransport::blocking};
    const auto kind = random_int(0, 1) ? PipelineKind::one_f_one_b : PipelineKind::zero_bubble;
    const PipelineSchedule whole = pipeline_schedule({kind, 3, 1, 6});
    for (const PipelineTransport transport : both) REQUIRE(refusal(whole, transport).empty());

    PipelineSchedule without = whole;
    without.ranks[1].actions.erase(find(without, 1, Work::send_activation, 5));
    // With sends that return at once rank 0 has posted its last receives.
    CHECK(contains(refusal(without, PipelineTransport::blocking), "deadlocks: rank 0 at"));
    CHECK(contains(refusal(without, PipelineTransport::buffered),
                   "rank 2 at the forward of micro-batch 5 in stage 2"));

    // Both ranks send first: that only works if sends return at once.
    PipelineSchedule crossed = whole;
    const auto send = find(crossed, 2, Work::send_gradient, 0),
               receive = find(crossed, 2, Work::receive_activation, 1);
    REQUIRE(receive < send);
    std::rotate(receive, receive + 1, send + 1);
    CHECK(refusal(crossed, PipelineTransport::buffered).empty());
    CHECK(contains(refusal(crossed, PipelineTransport::blocking), "deadlocks"));
}

TEST_CASE("a simulated pipeline refuses to receive another message than the next one",
          "[pipeline_simulation]") {
    PipelineSchedule schedule = pipeline_schedule({PipelineKind::gpipe, 2, 1, 4});
    std::iter_swap(find(schedule, 1, Work::receive_activation, 1),
                   find(schedule, 1, Work::receive_activation, 2));
    for (const auto transport : {PipelineTransport::buffered, PipelineTransport::blocking})
        CHECK(
            refusal(schedule, transport) ==
            "the pipeline schedule is wrong: rank 1 is at receiving the activations of micro-batch "
            "2 in stage 1, where rank 0 is at sending the activations of micro-batch 1 in stage 0");
}

TEST_CASE("a slow stage sets the pace of a simulated pipeline", "[pipeline_simulation]") {
    const int m = 40, slow = static_cast<int>(random_int(0, 3));
    const PipelineSchedule schedule = pipeline_schedule({PipelineKind::one_f_one_b, 4, 1, m});
    PipelineTimes times = same_times(schedule, 1, 1, 1);
    times.stages[static_cast<size_t>(slow)] = {2, 2, 2};
    const PipelineTimeline timeline = simulate(schedule, times);
    // The first micro-batch reaches the slow stage after `slow` forwards of the others. The stage
    // runs 4 − slow forwards, which take 2 each, and waits for the first gradient, which needs one
    // of these and (3 − slow)·(1 + 2) in the stages after it: for 3 − slow. Then it never waits
    // again. Its last gradient passes `slow` backwards of the others.
    const int idle = slow + (3 - slow) + 2 * slow;
    CHECK(timeline.makespan == 6 * m + idle);
    CHECK(timeline.idle[static_cast<size_t>(slow)] == idle);
}
