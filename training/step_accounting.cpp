#include "training/step_accounting.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "base/error.h"

namespace train_gpt {

void StepAccounting::add(const StepTimes& times) {
    if (++steps_ > warm_up) sum_.add(times);
}

std::string StepAccounting::summary(const World& world) const {
    constexpr size_t phases = static_cast<size_t>(StepPhase::count);
    const size_t ranks = static_cast<size_t>(world.size());
    // Each rank's seconds by phase, filled in by that rank.
    std::vector<double> seconds(ranks * phases);
    std::copy(sum_.seconds.begin(), sum_.seconds.end(),
              seconds.begin() + static_cast<std::ptrdiff_t>(phases) * world.rank());
    world.all_reduce_sum(seconds);
    const std::vector<std::string> hosts = world.all_gather(world.host());
    if (steps_ <= warm_up) return "";

    StepTimes all;
    std::vector<std::pair<double, size_t>> compute;  // seconds, rank
    for (size_t rank = 0; rank < ranks; ++rank) {
        for (size_t phase = 0; phase < phases; ++phase)
            all.seconds[phase] += seconds[rank * phases + phase];
        compute.emplace_back(seconds[rank * phases], rank);
    }
    std::string text = "time of a step:";
    for (size_t phase = 0; phase < phases; ++phase) {
        if (phase == static_cast<size_t>(StepPhase::tensor) && all.seconds[phase] == 0) continue;
        char share[64];
        std::snprintf(share, sizeof share, "%s %s %.1f%%", phase ? "," : "",
                      name_of(static_cast<StepPhase>(phase)),
                      100 * all.seconds[phase] / all.total());
        text += share;
    }
    if (ranks == 1) return text;
    std::sort(compute.begin(), compute.end());
    const auto [longest, slowest] = compute.back();
    const double median = (compute[(ranks - 1) / 2].first + compute[ranks / 2].first) / 2;
    char slower[32];
    std::snprintf(slower, sizeof slower, "%.1f%%", 100 * (longest / median - 1));
    return concat(text, "; rank ", slowest, " (", hosts[slowest], ") computes longest, ", slower,
                  " more than the median");
}

}  // namespace train_gpt
