#include "training/plan/memory_plan.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/formatted.h"
#include "training/trainer.h"

namespace train_gpt {

namespace {

/// The same memory, from shorter lists: with these micro-batches on each data rank, schedules that
/// do not hold all micro-batches hold as many activations and messages at a time as with more.
RunShape with_short_schedule(RunShape shape) {
    Config& config = shape.config;
    const auto& p = config.parallel;
    if (p.pipeline > 1 && holds_all_micro_batches(p.schedule)) return shape;
    const int64_t enough = int64_t{4} * p.pipeline * shape.mesh.size(Axis::data) *
                           config.batch.micro_batch * config.sequence_length();
    config.batch.tokens_per_step = std::min(config.batch.tokens_per_step, enough);
    return shape;
}

}  // namespace

Arena plan_memory(const RunShape& shape, const Device& device, std::optional<int> rank) {
    const RunShape shorter = with_short_schedule(shape.for_counting());
    const auto plan_of = [&](int r) {
        Arena plan = Arena::counting(device);
        const Trainer counted(shorter, plan, r);
        return plan;
    };
    if (rank) return plan_of(*rank);
    std::optional<Arena> fullest;
    for (const int r : shape.mesh.first_ranks(Axis::pipeline)) {
        Arena plan = plan_of(r);
        if (!fullest || plan.total_bytes() > fullest->total_bytes())
            fullest.emplace(std::move(plan));
    }
    return std::move(*fullest);
}

std::vector<DeviceAndHost> memory_of_stages(const RunShape& given, const Device& device) {
    const RunShape shape = given.for_counting();
    std::vector<DeviceAndHost> memory;
    for (const int rank : shape.mesh.first_ranks(Axis::pipeline)) {
        const Arena plan = plan_memory(shape, device, rank);
        memory.push_back({plan.total_bytes(), plan.host_bytes()});
    }
    return memory;
}

DeviceAndHost most_memory(const RunShape& shape, const Device& device) {
    DeviceAndHost most;
    for (const DeviceAndHost& stage : memory_of_stages(shape, device)) {
        most.device = std::max(most.device, stage.device);
        most.host = std::max(most.host, stage.host);
    }
    return most;
}

Arena allocate(const Arena& plan) {
    try {
        return Arena(plan.device(), plan);
    } catch (const Error& error) {
        throw Error(error.what(), "; the plan is:\n", Lines{memory_table(plan)});
    }
}

std::string label_of(Purpose purpose, const Device& device) {
    return concat(name_of(purpose),
                  is_on_host(purpose) && device.has_own_memory() ? " (host)" : "");
}

std::string memory_table(const Arena& plan) {
    std::string table;
    for (size_t i = 0; i < static_cast<size_t>(Purpose::count); ++i) {
        const auto purpose = static_cast<Purpose>(i);
        if (plan.bytes(purpose) == 0) continue;
        table += formatted("  %-14s %12s\n", label_of(purpose, plan.device()).c_str(),
                           format_bytes(plan.bytes(purpose)).c_str());
    }
    return table + formatted("  %-14s %12s\n", "total", format_bytes(plan.total_bytes()).c_str());
}

}  // namespace train_gpt
