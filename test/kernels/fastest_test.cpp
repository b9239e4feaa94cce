#include "kernels/fastest.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "test/catch.h"
#include "test/random.h"

namespace train_gpt {

namespace {

/// Candidates on a device whose speed changes while it works.
struct TimedDevice {
    std::vector<double> seconds;  // of a run at the start; infinity: cannot run
    double drift = 0;             // by how much a run becomes slower in each second
    std::vector<int> runs = std::vector<int>(seconds.size());
    double now = 0;

    size_t fastest() {
        return train_gpt::fastest(seconds.size(), [&](size_t i, int times) {
            double spent = 0;
            for (int run = 0; run < times; ++run) {
                const bool loads = runs[i]++ == 0;
                spent += (loads ? 50 : 1) * seconds[i] * (1 + drift * (now + spent));
            }
            now += seconds[i] < std::numeric_limits<double>::infinity() ? spent : 0;
            return spent / times;
        });
    }
};

double random_seconds(double least, double most) {
    return least + (most - least) * static_cast<double>(random_int(0, 1 << 20)) / (1 << 20);
}

}  // namespace

TEST_CASE("the fastest candidate is found while the clock slows down or speeds up", "[fastest]") {
    for (int i = 0; i < 200; ++i) {
        const auto count = static_cast<size_t>(random_int(1, 32));
        const double least = random_seconds(5e-6, 2e-3);
        TimedDevice device{.seconds = {}};
        for (size_t k = 0; k < count; ++k)
            device.seconds.push_back(random_seconds(1.03, 2.0) * least);
        const auto best = static_cast<size_t>(random_int(0, static_cast<int64_t>(count) - 1));
        device.seconds[best] = least;
        device.runs.assign(count, 0);
        // Over the screening, in which first runs take longest, a third.
        device.drift = random_seconds(-0.3, 0.3) / (60 * 1.5 * least * static_cast<double>(count));
        CAPTURE(count, least, best, device.drift);
        CHECK(device.fastest() == best);
    }
}

TEST_CASE("candidates that cannot run are not chosen", "[fastest]") {
    constexpr double never = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 50; ++i) {
        const auto count = static_cast<size_t>(random_int(1, 20));
        std::vector<double> seconds(count, never);
        CHECK(TimedDevice{.seconds = seconds}.fastest() == count);
        const auto only = static_cast<size_t>(random_int(0, static_cast<int64_t>(count) - 1));
        seconds[only] = 1e-4;
        CHECK(TimedDevice{.seconds = seconds}.fastest() == only);
    }
    CHECK(TimedDevice{}.fastest() == 0);
}

TEST_CASE("the time that a choice takes is bounded", "[fastest]") {
    TimedDevice slow{.seconds = std::vector<double>(32, 0.1)};
    slow.fastest();
    CHECK(std::ranges::count(slow.runs, 0) == 28);
    CHECK(*std::ranges::max_element(slow.runs) == 4);  // once untimed, twice, and one turn
    TimedDevice quick{.seconds = std::vector<double>(32, 1e-5)};
    quick.fastest();
    CHECK(std::ranges::count(quick.runs, 0) == 0);
    CHECK(quick.now < 0.1);
}

}  // namespace train_gpt
