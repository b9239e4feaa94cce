#include "training/watch/step_accounting.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <vector>

#include "base/error.h"
#include "base/formatted.h"

namespace train_gpt {

namespace {

/// The seconds of all ranks, by group. A rank may never have waited for a group that others waited
/// for.
std::map<std::string, double> exposed_of(const StepTimes& mine, const World& world) {
    std::string names;
    for (const auto& [group, seconds] : mine.exposed) names += group + '\n';
    std::set<std::string> groups;
    for (const std::string& of_rank : world.all_gather(names)) {
        std::istringstream lines(of_rank);
        for (std::string group; std::getline(lines, group);) groups.insert(group);
    }
    std::vector<double> seconds;
    for (const std::string& group : groups)
        seconds.push_back(mine.exposed.contains(group) ? mine.exposed.at(group) : 0);
    world.all_reduce_sum(seconds);
    std::map<std::string, double> all;
    size_t i = 0;
    for (const std::string& group : groups) all[group] = seconds[i++];
    return all;
}

}  // namespace

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
    const std::map<std::string, double> exposed = exposed_of(sum_, world);
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
        const bool communicates = phase == static_cast<size_t>(StepPhase::communication);
        if (communicates && ranks == 1 && exposed.empty()) continue;
        const auto share = [&](double part) {
            return formatted("%.1f%%", 100 * part / all.total());
        };
        text += concat(phase ? ", " : " ", name_of(static_cast<StepPhase>(phase)), " ",
                       share(all.seconds[phase]));
        if (!communicates || exposed.size() < 2) continue;
        const char* separator = " (";
        for (const auto& [group, part] : exposed) {
            text += concat(separator, group, " ", share(part));
            separator = ", ";
        }
        text += ")";
    }
    if (ranks == 1) return text;
    std::sort(compute.begin(), compute.end());
    const auto [longest, slowest] = compute.back();
    const double median = (compute[(ranks - 1) / 2].first + compute[ranks / 2].first) / 2;
    return concat(text, "; rank ", slowest, " (", hosts[slowest], ") computes longest, ",
                  formatted("%.1f%%", 100 * (longest / median - 1)), " more than the median");
}

}  // namespace train_gpt
