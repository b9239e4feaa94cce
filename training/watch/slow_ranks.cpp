#include "training/watch/slow_ranks.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/formatted.h"
#include "base/json_text.h"
#include "base/median.h"

namespace train_gpt {

namespace {

constexpr double slow_ratio = 1.5, least_share = 0.1;

double seconds_of_micro_batch(const MeasuredWork& rank) {
    return rank.own_seconds() / static_cast<double>(std::max<int64_t>(rank.micro_batches, 1));
}

std::string packed(const MeasuredWork& work) {
    return to_text(Json{{"host", work.host},
                        {"seconds", work.times.seconds},
                        {"n", work.micro_batches},
                        {"stage", work.stage}});
}

MeasuredWork unpacked(const std::string& text) {
    const Json json = parse_json(text);
    MeasuredWork work{.host = json.at("host"),
                      .times = {},
                      .micro_batches = json.at("n"),
                      .stage = json.at("stage")};
    work.times.seconds = json.at("seconds").get<decltype(work.times.seconds)>();
    return work;
}

}  // namespace

std::vector<SlowWork> find_slow_work(std::span<const MeasuredWork> ranks) {
    std::vector<SlowWork> slow;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
        std::vector<double> others;
        for (size_t other = 0; other < ranks.size(); ++other)
            if (other != rank && ranks[other].stage == ranks[rank].stage)
                others.push_back(seconds_of_micro_batch(ranks[other]));
        if (others.empty()) continue;
        const double usual = median(others), own = seconds_of_micro_batch(ranks[rank]);
        const double longer = (own - usual) * static_cast<double>(ranks[rank].micro_batches);
        if (own > slow_ratio * usual && longer >= least_share * ranks[rank].times.total())
            slow.push_back({static_cast<int>(rank), own / usual});
    }
    return slow;
}

void SlowWorkWatch::add(const StepTimes& times, int64_t micro_batches) {
    if (steps_ == 0) work_.micro_batches = 0;
    ++steps_;
    work_.times.add(times);
    work_.micro_batches += micro_batches;
}

std::vector<std::string> SlowWorkWatch::take(int64_t last_step, const World& world, int stage) {
    work_.host = world.host();
    work_.stage = stage;
    std::vector<MeasuredWork> ranks;
    if (world.size() > 1)
        for (const std::string& text : world.all_gather(packed(work_)))
            ranks.push_back(unpacked(text));
    std::vector<std::string> lines;
    std::set<int> slow;
    for (const SlowWork& found : find_slow_work(ranks)) {
        slow.insert(found.rank);
        if (slow_.contains(found.rank)) continue;
        const MeasuredWork& its = ranks[static_cast<size_t>(found.rank)];
        std::string parts;
        for (const StepPhase phase :
             {StepPhase::compute, StepPhase::data, StepPhase::optimizer, StepPhase::communication})
            parts += concat(parts.empty() ? "" : ", ", name_of(phase), " ",
                            formatted("%.0f%%", 100 * its.times[phase] / its.times.total()));
        lines.push_back(
            concat(world.describe(found.rank), " (host ", its.host, ") is slow: in steps ",
                   last_step - steps_ + 1, " to ", last_step, " its own work took ",
                   formatted("%.1f", found.ratio),
                   " times as long as the median of the other ranks, which wait for it; its time: ",
                   parts));
    }
    slow_ = std::move(slow);
    steps_ = 0;
    work_ = {};
    return lines;
}

}  // namespace train_gpt
