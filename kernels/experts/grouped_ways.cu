#include <algorithm>
#include <iterator>
#include <limits>
#include <sstream>

#include "base/error.h"
#include "device/cuda.h"
#include "device/cuda_queue.h"
#include "kernels/experts/grouped_ways.h"
#include "kernels/fastest.h"

namespace train_gpt::cuda {

namespace {

constexpr GroupedWay all_ways[] = {GroupedWay::mma, GroupedWay::wgmma_128, GroupedWay::wgmma_256};
constexpr const char* names[] = {"mma", "wgmma_128", "wgmma_256"};

double seconds_of(Stream& stream, const GroupedWays::Submit& submit, GroupedWay way, int runs) {
    const std::shared_ptr<void> first = create_event(stream.device, true),
                                last = create_event(stream.device, true);
    record(first.get(), stream);
    for (int i = 0; i < runs; ++i)
        if (!submit(way)) return std::numeric_limits<double>::infinity();
    record(last.get(), stream);
    return seconds_between(first.get(), last.get()) / runs;
}

}  // namespace

const char* name_of(GroupedWay way) { return names[static_cast<int>(way)]; }

GroupedWays::GroupedWays(const Queue& queue) : has_wgmma_(queue.limits().architecture == 90) {}

GroupedWay GroupedWays::choose(Stream& stream, const std::string& name, bool repeatable,
                               const Submit& submit, GroupedWay untimed) {
    if (const auto found = chosen_.find(name); found != chosen_.end()) return found->second;
    if (!stream.settings.autotune || !repeatable) return untimed;
    const size_t best = fastest(std::size(all_ways), [&](size_t i, int runs) {
        return seconds_of(stream, submit, all_ways[i], runs);
    });
    return chosen_[name] = best < std::size(all_ways) ? all_ways[best] : GroupedWay::mma;
}

void GroupedWays::run(Stream& stream, const std::string& name, bool repeatable, int64_t columns,
                      const Submit& submit, GroupedWay untimed) {
    last_ = GroupedWay::mma;
    if (has_wgmma_ && stream.settings.grouped == KernelSettings::Grouped::wgmma)
        last_ = columns > 128 ? GroupedWay::wgmma_256 : GroupedWay::wgmma_128;
    else if (has_wgmma_ && stream.settings.grouped == KernelSettings::Grouped::automatic)
        last_ = choose(stream, name, repeatable, submit, untimed);
    if (submit(last_)) return;
    last_ = GroupedWay::mma;
    submit(last_);
}

std::string GroupedWays::choices() const {
    std::string text;
    for (const auto& [name, way] : chosen_)
        text += concat("grouped ", name, " ", name_of(way), "\n");
    return text;
}

GroupedWays::Chosen GroupedWays::read(const std::string& text) {
    Chosen chosen;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        std::istringstream from(line);
        std::string subject, product, extents, way, rest;
        from >> subject >> product >> extents >> way;
        const auto found = std::find(std::begin(names), std::end(names), way);
        if (!from || subject != "grouped" || found == std::end(names) || from >> rest)
            throw Error("The choices of grouped products are damaged in the line \"", line,
                        "\"; remove them to choose again.");
        chosen[concat(product, " ", extents)] = all_ways[found - std::begin(names)];
    }
    return chosen;
}

void GroupedWays::set_choices(const std::string& text) { chosen_ = read(text); }

bool GroupedWays::unite_choices(const std::vector<std::string>& texts) {
    Chosen united;
    for (const std::string& text : texts) united.merge(read(text));  // what is there stays
    const bool otherwise = std::ranges::any_of(united, [&](const auto& line) {
        const auto found = chosen_.find(line.first);
        return found != chosen_.end() && found->second != line.second;
    });
    chosen_ = std::move(united);
    return otherwise;
}

}  // namespace train_gpt::cuda
