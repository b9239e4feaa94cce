#include "training/plan/fit.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/printable.h"
#include "model/spec.h"
#include "parallel/axes/tensor.h"
#include "training/config/config_text.h"
#include "training/config/feeding.h"
#include "training/config/micro_batches.h"
#include "training/plan/memory_plan.h"
#include "training/plan/peak.h"
#include "training/plan/step_time.h"
#include "training/plan/traffic.h"

namespace train_gpt {

namespace {

/// The differences between two configurations, as command-line options.
std::string settings_of(const Config& from, const Config& to) {
    const std::map<std::string, std::string> before = config_values(from);
    std::string settings;
    for (auto [key, value] : config_values(to)) {
        if (value == before.at(key)) continue;
        settings += settings.empty() ? " with --set " : " --set ";
        // A list without spaces, a string without the quotes of JSON.
        std::erase(value, value.starts_with("[") ? ' ' : '"');
        settings += shell_word(concat(key, "=", value));
    }
    return settings;
}

constexpr int64_t most_ranks = 1 << 20;  // the limit of plan --world

}  // namespace

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

std::string change_that_fits(const RunShape& shape, const Device& device,
                             const DeviceAndHost& available) {
    const Config& config = shape.config;
    const int ranks = shape.mesh.world();
    const auto on_ranks = [&](const Config& changed, int on) {
        return RunShape(changed, shape.spec, shape.dtype, shape.recompute, on);
    };
    const auto try_with = [&](Config changed, int on) -> std::string {
        Fit fit;
        try {
            fit = fit_into(available, on_ranks(changed, on), device);
        } catch (const Error&) {  // such as more micro-batches than exact sums can add up
            return "";
        }
        if (!fit.memory.fits(available)) return "";
        if (config.batch.micro_batch > 0) changed.batch.micro_batch = fit.micro_batch;
        if (!config.memory.recompute.is_auto()) changed.memory.recompute = fit.recompute;
        if (offload_of(config) && !offload_of(changed))
            changed = on_ranks(changed, on).with_offload(fit.offload).config;
        return concat("it fits",
                      on > ranks ? concat(" on ", on, " ranks with as much memory each") : "",
                      settings_of(config, changed));
    };
    const std::optional<Offload> offload = offload_of(config);
    if (offload && !(*offload == Offload{})) {  // perhaps the host is short
        Config other = config;
        other.memory.offload = {"auto"};
        if (const std::string found = try_with(other, ranks); !found.empty()) return found;
    }
    Config open = config;
    open.memory.recompute = std::nullopt;
    if (const std::string found = try_with(open, ranks); !found.empty()) return found;
    open.batch.micro_batch = 0;
    if (const std::string found = try_with(open, ranks); !found.empty()) return found;
    open.memory.offload = {"auto"};
    if (const std::string found = try_with(open, ranks); !found.empty()) return found;
    if (config.saves_in_background()) {
        Config at_once = config;
        at_once.checkpoint.async = false;
        if (const std::string found = try_with(at_once, ranks); !found.empty()) return found;
        open.checkpoint.async = false;
        if (const std::string found = try_with(open, ranks); !found.empty()) return found;
    }
    // Exact sums need memory for the gradients of a block, the embedding or the head.
    Config in_fp32 = open;
    in_fp32.parallel.sums = GradientSums::fp32;
    if (config.parallel.sums == GradientSums::exact)
        if (const std::string found = try_with(in_fp32, ranks); !found.empty()) return found;

    std::vector<std::optional<int>> stages;
    for (int zero = std::max(1, config.parallel.zero.value_or(3)); zero <= 3; ++zero)
        stages.emplace_back(config.parallel.zero ? std::optional(zero) : std::nullopt);
    const int data = shape.mesh.size(Axis::data);
    const auto try_here = [&](Config changed) -> std::string {
        for (const std::optional<int> zero : stages) {
            if (data > 1) changed.parallel.zero = zero;
            if (const std::string found = try_with(changed, ranks); !found.empty()) return found;
            if (data == 1) break;  // there is nothing to split
        }
        return "";
    };
    if (const std::string found = try_here(open); !found.empty()) return found;
    // What is above keeps an update's numbers; a state in fewer bytes rounds them.
    for (const StateDType dtype : {StateDType::bf16, StateDType::int8}) {
        Config rounded = open;
        rounded.optimizer.state_dtype = dtype;
        const bool is_less = dtype > StateDType{config.optimizer.state_dtype};
        if (!is_less || (dtype == StateDType::int8 && config.optimizer.name == OptimizerName::muon))
            continue;
        if (const std::string found = try_here(rounded); !found.empty()) return found;
    }

    // The most ranks or the shortest sequences need the least memory: where those do not fit,
    // nothing in between does.
    const int64_t sequences = config.least_tokens_per_step() / config.sequence_length();
    int most = ranks;
    while (2 * int64_t{most} <= std::min(sequences, most_ranks)) most *= 2;
    for (const int times : {1, 2, 4, 8}) {
        Config split = open;
        split.parallel.tensor *= times;
        const int largest = most * times;
        if (tensor_problem(shared_sizes(shape.spec), split.parallel.tensor) ||
            !can_feed(split, largest / times / (ranks / data)))
            continue;
        std::vector<Config> ways;  // that fit on the most ranks
        for (const std::optional<int> zero : stages) {
            split.parallel.zero = zero;
            if (!try_with(split, largest).empty()) ways.push_back(split);
        }
        for (int on = data % times == 0 ? ranks : ranks * times; on <= largest; on *= 2)
            for (const Config& way : ways)
                if (const std::string found = try_with(way, on); !found.empty()) return found;
    }
    const int64_t tokens = config.least_tokens_per_step();
    int shortest = config.sequence_length();
    // Where a rank holds all tokens of a step, shorter sequences do not need less memory.
    const bool holds_all =
        config.parallel.pipeline > 1 && holds_all_micro_batches(config.parallel.schedule);
    while (!holds_all && shortest % 2 == 0 && tokens / shortest < most_ranks) shortest /= 2;
    const auto with_length = [&](int T) {
        Config shorter = open;
        shorter.batch.sequence_length = T;
        return try_with(shorter, ranks);
    };
    if (!with_length(shortest).empty())
        for (int T = config.sequence_length(); T >= shortest; T /= 2)
            if (const std::string found = with_length(T); !found.empty()) return found;

    open.parallel.zero = 3;
    open.batch.micro_batch = 1;
    if (!contributions_problem(open).empty()) open.parallel.sums = GradientSums::fp32;
    const bool offloads = device.has_own_memory();
    const RunShape least =
        on_ranks(open, most).with_recompute(Recompute::block).with_offload({offloads, offloads});
    const Arena plan = plan_memory(least, device);
    return concat("with a micro-batch of one sequence, recomputed blocks and parallel.zero=3",
                  offloads ? ", and all offloaded that can be," : ",", " each of ", most,
                  most == 1 ? " rank needs " : " ranks needs ", format_bytes(plan.total_bytes()),
                  ", ", format_bytes(plan.bytes(Purpose::activations)),
                  " of it for activations; take a smaller model");
}

namespace {

/// change_that_fits() for a run in which all is decided.
std::string change_of_decided(const RunShape& shape, const Device& device,
                              const DeviceAndHost& available) {
    RunShape decided = shape;
    decided.config.memory.recompute = shape.recompute;
    return change_that_fits(decided, device, available);
}

/// What helps where the host has less memory than the plan pins.
std::string change_that_pins_less(const Arena& plan, const RunShape& shape,
                                  DeviceAndHost available) {
    available.host = std::min(available.host, uint64_t{plan.host_bytes()} - 1);
    return change_of_decided(shape, plan.device(), available);
}

}  // namespace

void require_host_memory(const Arena& plan, const RunShape& shape, const DeviceAndHost& available,
                         int local_ranks) {
    const uint64_t needed = plan.host_bytes();
    if (needed <= available.host) return;
    const uint64_t of_all = available.host * static_cast<uint64_t>(local_ranks);
    std::string fewer;
    if (local_ranks > 1 && needed <= of_all)
        fewer = concat("; or start at most ", of_all / needed, " ranks on each host");
    throw Error("this run pins ", format_bytes(needed),
                " of the host's memory on each rank, but only ", format_bytes(available.host),
                " of what is free may be pinned",
                local_ranks > 1 ? concat(" by each of the host's ", local_ranks, " ranks") : "",
                "; ", change_that_pins_less(plan, shape, available), fewer);
}

Arena allocate_or_advise(const Arena& plan, const RunShape& shape, int local_ranks) {
    try {
        return allocate(plan);
    } catch (const Error& error) {
        const Device device = plan.device();
        const DeviceAndHost available = memory_for_a_rank(device, shape.mesh, local_ranks);
        const bool has_memory = plan.total_bytes() <= available.device;
        if (has_memory && !device.is_cuda())
            throw Error(
                Lines{error.what()},
                "the machine has that much, so a limit of this process forbids it; see ulimit -v");
        if (has_memory && plan.host_bytes() > 0)
            throw Error(Lines{error.what()}, change_that_pins_less(plan, shape, available),
                        local_ranks > 1 ? "; or start fewer ranks on each host" : "");
        throw Error(Lines{error.what()}, change_of_decided(shape, device, available));
    }
}

}  // namespace train_gpt
