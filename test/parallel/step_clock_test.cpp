// Where the time of a step is counted. The bounds are from below alone: what a step slept, it took.
#include "parallel/step_clock.h"

#include <chrono>
#include <thread>

#include "parallel/state/exchange.h"
#include "test/catch.h"

using namespace train_gpt;

namespace {

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

}  // namespace

TEST_CASE("communication counts for the group of ranks that is waited for, within any phase",
          "[clock]") {
    const Device device;
    Stream stream(device);
    StepClock clock(device);
    Exchange exchange(std::make_shared<Stream>(device), {"shard", "tensor"}, &clock);
    const auto work = [&](int slot, int ms) {
        exchange.submit(stream, slot, [&](Stream&) { sleep_ms(ms); });
        exchange.hold(stream, slot);
    };
    work(0, 1);  // outside a step
    for (const int factor : {1, 2}) {
        clock.begin(stream);
        sleep_ms(3 * factor);
        work(0, 5 * factor);
        {
            const StepClock::Interval interval(&clock, stream, StepPhase::optimizer);
            sleep_ms(2 * factor);
            work(1, 7 * factor);
            exchange.submit(stream, 0, [&](Stream& on) {
                sleep_ms(4 * factor);
                const StepClock::Interval inner(&clock, on, StepPhase::communication, "replica");
                sleep_ms(6 * factor);
            });
            sleep_ms(1 * factor);
        }
        clock.end(stream);
    }
    for (const int factor : {1, 2}) {
        const StepTimes times = clock.pop();
        CHECK(times.exposed.size() == 3);
        CHECK(times.exposed.at("shard") >= 9e-3 * factor);
        CHECK(times.exposed.at("tensor") >= 7e-3 * factor);
        CHECK(times.exposed.at("replica") >= 6e-3 * factor);
        CHECK(times[StepPhase::optimizer] >= 3e-3 * factor);
        CHECK(times[StepPhase::compute] >= 3e-3 * factor);
        double waited = 0;
        for (const auto& [group, seconds] : times.exposed) waited += seconds;
        CHECK(waited == Approx(times[StepPhase::communication]));
    }
    StepTimes twice;
    twice.exposed["shard"] = 1;
    twice.add({.seconds = {}, .exposed = {{"shard", 2}, {"data", 3}}});
    CHECK(twice.exposed == std::map<std::string, double>{{"shard", 3}, {"data", 3}});
}
