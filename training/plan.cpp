#include "training/plan.h"

#include <cstdio>

#include "kernels/error.h"
#include "tokenizer/tokenizer.h"
#include "training/schedule.h"
#include "training/trainer.h"

namespace train_gpt {

namespace {

std::string with_separators(int64_t n) {
    std::string digits = std::to_string(n);
    for (int i = static_cast<int>(digits.size()) - 3; i > 0; i -= 3)
        digits.insert(static_cast<size_t>(i), ",");
    return digits;
}

template <class... Args>
std::string formatted(const char* format, Args... args) {
    char text[256];
    std::snprintf(text, sizeof text, format, args...);
    return text;
}

/// "staging" lies in the host's memory where the device is a GPU.
std::string label_of(Purpose purpose, const Device& device) {
    return concat(name_of(purpose),
                  purpose == Purpose::staging && device.is_cuda() ? " (host)" : "");
}

/// What each rank sends in a step, with P elements in all buckets, padding included, and d ranks: a reduction of gradients
/// b·P·(d−1)/d bytes, where b is 4 or in bf16 2; as much for each micro-batch with ZeRO-2, twice as much with ZeRO-0; the gathering of
/// weights in their dtype s·P·(d−1)/d, but with ZeRO-0.
std::string traffic_line(const Config& config, const GPTShape& shape, DType dtype, int world) {
    const Sharding sharding = sharding_of(config, 0, world);
    const BucketLayout layout(gpt_parameters(shape), world, sharding.bucket_elements);
    const int64_t micro_batches = (config.micro_batches_per_step() + world - 1) / world;
    const double others = static_cast<double>(layout.numel()) * (world - 1) / world;
    const double reductions = sharding.zero == 0   ? 2.0
                              : sharding.zero == 1 ? 1.0
                                                   : static_cast<double>(micro_batches);
    const auto bytes = [](double n) { return format_bytes(static_cast<uint64_t>(n)); };
    return formatted(
        "traffic      of each rank and step, ZeRO-%d: %s of gradients in %s, %s of weights, in %zu "
        "buckets\n",
        sharding.zero,
        bytes(reductions * others * static_cast<double>(size_of(sharding.reduce_dtype))).c_str(),
        name_of(sharding.reduce_dtype),
        bytes(sharding.zero == 0 ? 0.0 : others * static_cast<double>(size_of(dtype))).c_str(),
        layout.buckets().size());
}

constexpr Recompute recompute_levels[] = {Recompute::none, Recompute::elementwise,
                                          Recompute::block};

}  // namespace

int64_t vocab_size_of(const Config& config) {
    if (config.model.vocab_size > 0) return config.model.vocab_size;
    if (config.tokenizer.path.empty())
        throw Error(
            "model.vocab_size is 0 and there is no tokenizer.path to take it from; set one of "
            "them");
    return Tokenizer::load(config.tokenizer.path).vocab_size();
}

DType resolve_dtype(const std::string& wanted, const Device& device) {
    if (wanted == "bf16") return DType::bf16;
    if (wanted == "fp32") return DType::fp32;
    return device.kind == Device::Kind::cuda || cpu_info().native_bf16() ? DType::bf16
                                                                         : DType::fp32;
}

Arena plan_memory(const Config& config, const GPTShape& shape, DType dtype, Recompute recompute,
                  const Device& device, int ranks) {
    Arena plan = Arena::counting(device);
    const Trainer counted(config, shape, dtype, recompute, plan, sharding_of(config, 0, ranks));
    return plan;
}

Recompute resolve_recompute(const Config& config, const GPTShape& shape, DType dtype,
                            const Device& device, uint64_t available, int ranks) {
    if (config.precision.recompute != "auto") return recompute_from(config.precision.recompute);
    for (const Recompute level : recompute_levels)
        if (plan_memory(config, shape, dtype, level, device, ranks).total_bytes() <= available)
            return level;
    return Recompute::block;
}

std::string change_that_fits(const Config& config, const GPTShape& shape, DType dtype,
                             const Device& device, uint64_t available, int ranks) {
    const auto fits = [&](const Config& changed, Recompute level) {
        return plan_memory(changed, shape, dtype, level, device, ranks).total_bytes() <= available;
    };
    for (const Recompute level : recompute_levels)
        if (fits(config, level)) return formatted("precision.recompute=%s fits", name_of(level));
    // The step must stay whole micro-batches: smaller ones divide the present one.
    Config smaller = config;
    for (int& B = smaller.batch.micro_batch; --B > 0;) {
        if (config.batch.micro_batch % B != 0) continue;
        for (const Recompute level : recompute_levels)
            if (fits(smaller, level))
                return formatted("batch.micro_batch=%d with precision.recompute=%s fits", B,
                                 name_of(level));
    }
    return formatted(
        "no micro-batch of this model fits; take a smaller model, a shorter batch.sequence_length, "
        "or more ranks%s, which share the optimizer's state",
        config.parallel.zero > 0 ? "" : " and parallel.zero=1");
}

Arena allocate(const Arena& plan, const Config& config, const GPTShape& shape, DType dtype,
               int ranks) {
    try {
        return allocate(plan);
    } catch (const Error& error) {
        const uint64_t available = memory_available(plan.device());
        throw Error(
            Lines{error.what()}, "  ",
            !plan.device().is_cuda() && plan.total_bytes() <= available
                ? "the machine has that much, so a limit of this process forbids it; see ulimit -v"
                : change_that_fits(config, shape, dtype, plan.device(), available, ranks));
    }
}

Arena allocate(const Arena& plan) {
    try {
        return Arena(plan.device(), plan);
    } catch (const Error& error) {
        throw Error(error.what(), "; the plan is:\n", Lines{memory_table(plan)});
    }
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

std::string plan_report(const Config& config, const Device& device, int world) {
    const GPTShape shape = shape_of(config, vocab_size_of(config));
    const DType dtype = resolve_dtype(config.precision.dtype, device);
    const int T = config.sequence_length();
    const int64_t micro_batches = config.micro_batches_per_step();
    if (world > micro_batches)
        throw Error("a step has ", micro_batches, " micro-batches, fewer than the ", world,
                    " ranks; raise batch.tokens_per_step to at least ",
                    int64_t{world} * config.batch.micro_batch * T, " or lower batch.micro_batch");
    int64_t parameters = 0;
    for (const Parameter& p : gpt_parameters(shape)) parameters += p.numel();
    const double flops = shape.flops_per_token(T);

    std::string report;
    report += formatted(
        "model        %d layers, %d heads of %d, %d channels, %lld positions, vocabulary %lld "
        "(%lld in "
        "memory)\n",
        shape.n_layer, shape.n_head, shape.head_size(), shape.n_embd,
        static_cast<long long>(shape.n_ctx), static_cast<long long>(shape.vocab_size),
        static_cast<long long>(shape.padded_vocab()));
    report += formatted("parameters   %s\n", with_separators(parameters).c_str());
    report += formatted(
        "FLOPs        %.4g per token (6·N + 6·L·C·T, causal attention counted half), %.4g per "
        "step\n",
        flops, flops * static_cast<double>(config.batch.tokens_per_step));
    report += formatted(
        "step         %s tokens = %lld micro-batches of %d × %d tokens, on %d rank%s: %lld to %lld "
        "each\n",
        with_separators(config.batch.tokens_per_step).c_str(),
        static_cast<long long>(micro_batches), config.batch.micro_batch, T, world,
        world == 1 ? "" : "s", static_cast<long long>(micro_batches / world),
        static_cast<long long>((micro_batches + world - 1) / world));
    if (world > 1) report += traffic_line(config, shape, dtype, world);
    if (config.schedule.epochs == 0)
        report += formatted(
            "run          %s steps, %s tokens\n", with_separators(total_steps(config, 0)).c_str(),
            with_separators(total_steps(config, 0) * config.batch.tokens_per_step).c_str());
    report += formatted("device       %s, %s\n", device.kind == Device::Kind::cuda ? "CUDA" : "CPU",
                        name_of(dtype));

    std::vector<Arena> plans;
    for (Recompute level : recompute_levels)
        plans.push_back(plan_memory(config, shape, dtype, level, device, world));
    report += "\nmemory of each rank, by what is recomputed in the backward pass\n";
    report += formatted("  %-14s %14s %14s %14s\n", "", name_of(Recompute::none),
                        name_of(Recompute::elementwise), name_of(Recompute::block));
    const auto row = [&](const std::string& name, auto bytes) {
        report += formatted(
            "  %-14s %14s %14s %14s\n", name.c_str(), format_bytes(bytes(plans[0])).c_str(),
            format_bytes(bytes(plans[1])).c_str(), format_bytes(bytes(plans[2])).c_str());
    };
    for (size_t i = 0; i < static_cast<size_t>(Purpose::count); ++i) {
        const auto purpose = static_cast<Purpose>(i);
        if (plans[0].bytes(purpose))
            row(label_of(purpose, device), [&](const Arena& plan) { return plan.bytes(purpose); });
    }
    row("total", [](const Arena& plan) { return plan.total_bytes(); });
    const uint64_t available = memory_available(device);
    const Recompute level = resolve_recompute(config, shape, dtype, device, available, world);
    const size_t chosen = plans[static_cast<size_t>(level)].total_bytes();
    report += formatted("\nprecision.recompute = %s: %s of %s available here", name_of(level),
                        format_bytes(chosen).c_str(), format_bytes(available).c_str());
    if (chosen > available)
        report +=
            ": DOES NOT FIT; " + change_that_fits(config, shape, dtype, device, available, world);
    return report + "\n";
}

}  // namespace train_gpt
