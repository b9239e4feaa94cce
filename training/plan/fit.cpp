#include "training/plan/fit.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "model/spec.h"
#include "training/config/feeding.h"
#include "training/config/micro_batches.h"
#include "training/plan/memory_plan.h"
#include "training/plan/peak.h"
#include "training/plan/step_time.h"
#include "training/plan/traffic.h"

namespace train_gpt {

uint64_t memory_of_a_gpu(uint64_t free, const MeshLayout& mesh) {
    constexpr uint64_t of_axis = uint64_t{256} << 20;
    const int axes = std::popcount(mesh.extended(all_axes));  // with several ranks
    return free - std::min(free, of_axis * std::max(0, axes - 1));
}

uint64_t host_memory_of_a_rank(const CpuInfo& machine, int local_ranks) {
    if (machine.memory_total == 0) return unlimited_memory;
    return machine.memory_available / static_cast<uint64_t>(local_ranks);
}

DeviceAndHost memory_for_a_rank(const Device& device, const MeshLayout& mesh, int local_ranks) {
    const uint64_t of_host = host_memory_of_a_rank(cpu_info(), local_ranks);
    if (!device.is_cuda()) return {.device = of_host};
    // Memory that is pinned is lost to the system's file cache and to other programs.
    return {memory_of_a_gpu(memory_available(device), mesh),
            of_host == unlimited_memory ? of_host : of_host / 8 * 7};
}

bool weighs_link(const RunShape& shape) {
    return !shape.config.parallel.zero && sharding_of(shape, 0).is_split();
}

bool weighs_host(const DeviceAndHost& available, const RunShape& shape, const Device& device) {
    if (!device.is_cuda() || offload_of(shape.config)) return false;
    const Fit fit = fit_into(available, shape.with_offload({}), device);
    return !fit.memory.fits(available) || fit.recompute != Recompute::none;
}

Speeds deciding_speeds(Speeds known, const DeviceAndHost& available, const RunShape& shape,
                       const Device& device) {
    if (!weighs_host(available, shape, device)) known.host = 0;
    if (known.host == 0 && !weighs_link(shape)) known.flops = 0;
    return known;
}

Speeds measured_here(Speeds speeds, const DeviceAndHost& available, const RunShape& shape,
                     const Device& device) {
    const bool by_host = weighs_host(available, shape, device);
    if (by_host) speeds.host = measure_host_link(device);
    if (by_host || weighs_link(shape))
        speeds.flops = measure_peak_flops(device, shape.dtype, kernel_settings(shape.config));
    return speeds;
}

double assumed_link(const RunShape& shape, const Device& device) {
    constexpr double nvlink = 300e9, network = 40e9, shared_memory = 5e9;
    constexpr int gpus_of_a_node = 8;
    if (!device.is_cuda()) return shared_memory;
    return shape.mesh.world() <= gpus_of_a_node ? nvlink : network;
}

RunShape with_choices(const RunShape& shape, const Fit& fit) {
    return shape.with_micro_batch(fit.micro_batch)
        .with_recompute(fit.recompute)
        .with_zero(fit.zero)
        .with_offload(fit.offload);
}

namespace {

/// fit_into() for a stage of ZeRO. `time` is set to the time of the fit's step.
Fit fit_stage(const DeviceAndHost& available, const RunShape& shape, const Device& device,
              const StepTime& step_time, double& time) {
    const Config& config = shape.config;
    const std::vector<int> possible =
        possible_micro_batches(config, device, shape.mesh.size(Axis::data));
    const auto fit_of = [&](int B, Recompute level) {
        Fit fit{B, level, config.parallel.zero.value(), shape.offload()};
        fit.memory = most_memory(with_choices(shape, fit), device);
        return fit;
    };
    std::vector<Recompute> levels(std::begin(recompute_levels), std::end(recompute_levels));
    if (const std::optional<Recompute> given = config.memory.recompute) levels = {*given};

    const auto offloaded = [&](const Fit& fit, const Offload& offload) -> int64_t {
        if (offload == Offload{}) return 0;
        const RunShape with = with_choices(shape, fit).with_offload(offload);
        return static_cast<int64_t>(plan_memory(with, device).bytes(Purpose::offloaded));
    };
    Fit least = fit_of(possible.front(), levels.back());
    const int64_t state = offloaded(least, {.optimizer = least.offload.optimizer});
    const auto time_of = [&](const Fit& fit) {
        return step_time.of(with_choices(shape, fit), state);
    };
    time = time_of(least);
    least.offloaded = offloaded(least, least.offload);
    if (!least.memory.fits(available)) return least;
    Fit best = least;
    for (const Recompute level : levels) {
        // More sequences take more memory, so those that fit come first.
        const auto end = std::partition_point(possible.begin(), possible.end(), [&](int B) {
            return fit_of(B, level).memory.fits(available);
        });
        for (auto B = possible.begin(); B != end; ++B) {
            const Fit fit{*B, level, least.zero, least.offload};
            if (const double taken = time_of(fit); taken < time) best = fit, time = taken;
        }
    }
    best = fit_of(best.micro_batch, best.recompute);
    best.offloaded = offloaded(best, best.offload);
    return best;
}

}  // namespace

Fit fit_into(const DeviceAndHost& available, const RunShape& given, const Device& device,
             const Speeds& speeds) {
    const RunShape shape = given.for_counting();
    std::vector<int> stages = {1, 2, 3};
    const bool is_open = !shape.config.parallel.zero;
    if (!is_open)
        stages = {*shape.config.parallel.zero};
    else if (!sharding_of(shape, 0).is_split())
        stages = {1};  // the others would do the same
    std::vector<Offload> offloads = {device.has_own_memory() ? shape.offload() : Offload{}};
    const bool chooses_offload = device.has_own_memory() && !offload_of(shape.config);
    if (chooses_offload) offloads = {{}, {.activations = true}, {.optimizer = true}, {true, true}};
    const bool weighs_offload = chooses_offload && speeds.host > 0 && speeds.flops > 0;
    Speeds deciding = speeds;
    if (!is_open) deciding.link = 0;
    if (!is_open && !weighs_offload) deciding.flops = 0;
    const StepTime step_time(shape, device, deciding);
    constexpr double gain = 0.95;  // of the time, since offloading has costs that are not estimated
    struct Choice {
        Fit fit;
        double time = 0;
    };
    const auto fits = [&](const Choice& choice) { return choice.fit.memory.fits(available); };
    // Among choices that do not fit, the host's memory comes first.
    const auto lack = [&](const Choice& choice) {
        return std::pair(choice.fit.memory.host > available.host, choice.fit.memory.device);
    };
    const auto is_better = [&](const Choice& a, const std::optional<Choice>& b) {
        if (!b || fits(a) != fits(*b)) return !b || fits(a);
        return fits(a) ? a.time < b->time : lack(a) < lack(*b);
    };
    std::optional<Choice> best;
    for (const Offload& offload : offloads) {
        if (best && fits(*best) && !weighs_offload) break;
        std::optional<Choice> of_offload;
        for (const int stage : stages) {
            Choice choice;
            choice.fit = fit_stage(available, shape.with_zero(stage).with_offload(offload), device,
                                   step_time, choice.time);
            if (is_better(choice, of_offload)) of_offload = choice;
        }
        for (const bool is_offloaded : {offload.optimizer, offload.activations})
            if (is_offloaded) of_offload->time /= gain;
        if (is_better(*of_offload, best)) best = of_offload;
    }
    return best->fit;
}

RunShape with_kept(const RunShape& shape, const Choices& kept) {
    RunShape as_kept = shape;
    Config& config = as_kept.config;
    if (config.batch.micro_batch == 0) config.batch.micro_batch = kept.micro_batch;
    if (config.memory.recompute.is_auto() && !kept.recompute.empty())
        config.memory.recompute = recompute_from(kept.recompute);
    if (!config.parallel.zero && kept.zero > 0) config.parallel.zero = kept.zero;
    if (!offload_of(config) && !kept.offload.empty()) config.memory.offload = kept.offload;
    return as_kept;
}

Choices usable_choices(const Choices& kept, const DeviceAndHost& available, const RunShape& shape,
                       const Device& device) {
    const RunShape counted = shape.for_counting();
    Choices without_offload = kept;
    without_offload.offload = {};
    for (const Choices& choices : {kept, without_offload}) {
        const RunShape as_kept = with_kept(counted, choices);
        const Config& config = as_kept.config;
        const bool feeds =
            config.batch.micro_batch == 0 || can_feed(config, shape.mesh.size(Axis::data));
        if (feeds && !weighs_link(as_kept) &&
            fit_into(available, as_kept, device).memory.fits(available))
            return choices;
    }
    return {};
}

Choices choose_by_memory(const Choices& kept, const DeviceAndHost& available, const RunShape& shape,
                         const Device& device, const Speeds& speeds) {
    const Choices usable = usable_choices(kept, available, shape, device);
    const Fit fit = fit_into(available, with_kept(shape, usable), device, speeds);
    return {.micro_batch = fit.micro_batch,
            .recompute = name_of(fit.recompute),
            .zero = fit.zero,
            .sums = shape.config.parallel.sums,
            .offload = device.is_cuda() ? words_of(fit.offload) : std::vector<std::string>()};
}

bool saves_in_background(const RunShape& shape, const Device& device,
                         const DeviceAndHost& available) {
    if (shape.config.checkpoint.every == 0) return false;
    const std::optional<bool> given = shape.config.checkpoint.async;
    if (given) return *given;
    // A copy from the host to the host would keep the thread that submits steps.
    if (shape.offload().optimizer) return false;
    RunShape with = shape;
    with.config.checkpoint.async = true;
    return most_memory(with, device).fits({available.device, available.host / 2});
}

}  // namespace train_gpt
