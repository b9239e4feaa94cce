#include "training/plan/memory_advice.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/printable.h"
#include "parallel/axes/tensor.h"
#include "training/config/config_text.h"
#include "training/config/feeding.h"
#include "training/config/micro_batches.h"
#include "training/plan/fit.h"

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

/// Looks for a change of the configuration with which a run fits.
class FittingChange {
  public:
    FittingChange(const RunShape& shape, const Device& device, const DeviceAndHost& available)
        : shape_(shape),
          device_(device),
          available_(available),
          config_(shape.config),
          ranks_(shape.mesh.world()),
          data_(shape.mesh.size(Axis::data)) {
        for (int zero = std::max(1, config_.parallel.zero.value_or(3)); zero <= 3; ++zero)
            stages_.emplace_back(config_.parallel.zero ? std::optional(zero) : std::nullopt);
        const int64_t sequences = config_.least_tokens_per_step() / config_.sequence_length();
        while (2 * int64_t{most_fed_} <= std::min(sequences, most_ranks)) most_fed_ *= 2;
    }

    /// The change as a text, or what the run needs where nothing fits.
    std::string text() {
        if (const std::string found = keeping_state(); !found.empty()) return found;
        if (const std::string found = with_rounded_state(); !found.empty()) return found;
        if (const std::string found = on_more_ranks(); !found.empty()) return found;
        if (const std::string found = with_shorter_sequences(); !found.empty()) return found;
        return least_needed();
    }

  private:
    RunShape on_ranks(const Config& changed, int on) const {
        return {changed, shape_.spec, shape_.dtype, shape_.recompute, on};
    }

    /// The change to `changed` on so many ranks; empty if the run does not fit.
    std::string try_with(Config changed, int on) const {
        Fit fit;
        try {
            fit = fit_into(available_, on_ranks(changed, on), device_);
        } catch (const Error&) {  // such as more micro-batches than exact sums can add up
            return "";
        }
        if (!fit.memory.fits(available_)) return "";
        if (config_.batch.micro_batch > 0) changed.batch.micro_batch = fit.micro_batch;
        if (!config_.memory.recompute.is_auto()) changed.memory.recompute = fit.recompute;
        if (offload_of(config_) && !offload_of(changed))
            changed = on_ranks(changed, on).with_offload(fit.offload).config;
        return concat("it fits",
                      on > ranks_ ? concat(" on ", on, " ranks with as much memory each") : "",
                      settings_of(config_, changed));
    }

    /// The same on the ranks that are here, with the first stage of ZeRO that fits.
    std::string try_stages(Config changed) const {
        for (const std::optional<int> zero : stages_) {
            if (data_ > 1) changed.parallel.zero = zero;
            if (const std::string found = try_with(changed, ranks_); !found.empty()) return found;
            if (data_ == 1) break;  // there is nothing to split
        }
        return "";
    }

    /// Changes that do not round the optimizer's state. Leaves what they open in open_.
    std::string keeping_state() {
        const std::optional<Offload> offload = offload_of(config_);
        if (offload && !(*offload == Offload{})) {  // perhaps the host is short
            Config other = config_;
            other.memory.offload = {"auto"};
            if (const std::string found = try_with(other, ranks_); !found.empty()) return found;
        }
        open_.memory.recompute = std::nullopt;
        if (const std::string found = try_with(open_, ranks_); !found.empty()) return found;
        open_.batch.micro_batch = 0;
        if (const std::string found = try_with(open_, ranks_); !found.empty()) return found;
        open_.memory.offload = {"auto"};
        if (const std::string found = try_with(open_, ranks_); !found.empty()) return found;
        if (config_.saves_in_background()) {
            Config at_once = config_;
            at_once.checkpoint.async = false;
            if (const std::string found = try_with(at_once, ranks_); !found.empty()) return found;
            open_.checkpoint.async = false;
            if (const std::string found = try_with(open_, ranks_); !found.empty()) return found;
        }
        // Exact sums need memory for the gradients of a block, the embedding or the head.
        Config in_fp32 = open_;
        in_fp32.parallel.sums = GradientSums::fp32;
        if (config_.parallel.sums == GradientSums::exact)
            if (const std::string found = try_with(in_fp32, ranks_); !found.empty()) return found;
        return try_stages(open_);
    }

    /// A state in fewer bytes rounds the numbers of an update.
    std::string with_rounded_state() const {
        for (const StateDType dtype : {StateDType::bf16, StateDType::int8}) {
            Config rounded = open_;
            rounded.optimizer.state_dtype = dtype;
            const bool is_less = dtype > StateDType{config_.optimizer.state_dtype};
            if (!is_less ||
                (dtype == StateDType::int8 && config_.optimizer.name == OptimizerName::muon))
                continue;
            if (const std::string found = try_stages(rounded); !found.empty()) return found;
        }
        return "";
    }

    /// The most ranks need the least memory: where these do not fit, fewer ranks do not either.
    std::string on_more_ranks() const {
        for (const int times : {1, 2, 4, 8}) {
            Config split = open_;
            split.parallel.tensor *= times;
            const int largest = most_fed_ * times;
            if (tensor_problem(shared_sizes(shape_.spec), split.parallel.tensor) ||
                !can_feed(split, largest / times / (ranks_ / data_)))
                continue;
            std::vector<Config> ways;  // that fit on the most ranks
            for (const std::optional<int> zero : stages_) {
                split.parallel.zero = zero;
                if (!try_with(split, largest).empty()) ways.push_back(split);
            }
            for (int on = data_ % times == 0 ? ranks_ : ranks_ * times; on <= largest; on *= 2)
                for (const Config& way : ways)
                    if (const std::string found = try_with(way, on); !found.empty()) return found;
        }
        return "";
    }

    /// The shortest sequences need the least memory: where these do not fit, longer ones do not
    /// either.
    std::string with_shorter_sequences() const {
        const int64_t tokens = config_.least_tokens_per_step();
        int shortest = config_.sequence_length();
        // Where a rank holds all tokens of a step, shorter sequences do not need less memory.
        const bool holds_all =
            config_.parallel.pipeline > 1 && holds_all_micro_batches(config_.parallel.schedule);
        while (!holds_all && shortest % 2 == 0 && tokens / shortest < most_ranks) shortest /= 2;
        const auto with_length = [&](int T) {
            Config shorter = open_;
            shorter.batch.sequence_length = T;
            return try_with(shorter, ranks_);
        };
        if (with_length(shortest).empty()) return "";
        for (int T = config_.sequence_length(); T >= shortest; T /= 2)
            if (const std::string found = with_length(T); !found.empty()) return found;
        return "";
    }

    std::string least_needed() const {
        Config config = open_;
        config.parallel.zero = 3;
        config.batch.micro_batch = 1;
        if (!contributions_problem(config).empty()) config.parallel.sums = GradientSums::fp32;
        const bool offloads = device_.has_own_memory();
        const RunShape least = on_ranks(config, most_fed_)
                                   .with_recompute(Recompute::block)
                                   .with_offload({offloads, offloads});
        const Arena plan = plan_memory(least, device_);
        return concat("with a micro-batch of one sequence, recomputed blocks and parallel.zero=3",
                      offloads ? ", and all offloaded that can be," : ",", " each of ", most_fed_,
                      most_fed_ == 1 ? " rank needs " : " ranks needs ",
                      format_bytes(plan.total_bytes()), ", ",
                      format_bytes(plan.bytes(Purpose::activations)),
                      " of it for activations; take a smaller model");
    }

    const RunShape& shape_;
    const Device& device_;
    const DeviceAndHost& available_;
    const Config& config_;
    const int ranks_, data_;
    int most_fed_ = ranks_;  // the most ranks that the sequences of a step can feed
    std::vector<std::optional<int>> stages_;  // of ZeRO
    Config open_ = config_;  // with what may change left open, after keeping_state()
};

}  // namespace

std::string change_that_fits(const RunShape& shape, const Device& device,
                             const DeviceAndHost& available) {
    return FittingChange(shape, device, available).text();
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
