#include "training/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error.h"
#include "base/formatted.h"
#include "device/architecture.h"
#include "kernels/muon/newton_schulz.h"
#include "model/families/family.h"
#include "parallel/group_ctas.h"
#include "parallel/state/matrices.h"
#include "tokenizer/tokenizer.h"
#include "training/config/config_text.h"
#include "training/data_use.h"
#include "training/files/checkpoint.h"
#include "training/files/decay_start.h"
#include "training/plan/fit.h"
#include "training/plan/memory_advice.h"
#include "training/plan/pipeline_plan.h"
#include "training/plan/traffic.h"
#include "training/schedule.h"

namespace train_gpt {

namespace {

/// What each rank sends in a step, by group of ranks.
std::string traffic_line(const RunShape& shape) {
    const Sharding sharding = sharding_of(shape, 0);
    const BucketLayout layout(registry_of_rank(shape, 0).parameters, sharding.size,
                              sharding.bucket_elements);
    std::string text = concat("traffic      of each rank and step, ZeRO-",
                              shape.config.parallel.zero.value(), ": ");
    for (const auto& [group, bytes] : most_traffic(shape))
        text += concat(format_bytes(static_cast<uint64_t>(bytes)), " along ", group, ", ");
    return text + concat("gradients in ", name_of(sharding.dtype_between_ranks()), ", in ",
                         layout.buckets().size(), " buckets\n");
}

/// The shares of collectives in a GPU's multiprocessors, if groups have any.
std::string shares_line(const RunShape& shape, const PlanTarget& target) {
    const int available =
        target.is_here() ? multiprocessors(target.device) : target.multiprocessors;
    const std::string shares = describe(group_ctas(shape.mesh.world(), mesh_sizes(shape.config),
                                                   available, shape.config.parallel.nccl_max_ctas),
                                        available);
    return shares.empty() || available == 0 ? "" : concat("collectives  ", shares, "\n");
}

}  // namespace

std::string note_on_vocabulary(const Config& config, const DecoderSpec& spec,
                               const Tokenizer* tokenizer) {
    if (!tokenizer || config.model.vocab_size == 0 || !config.model.init_from.empty()) return "";
    const int64_t tokens = tokenizer->vocab_size(), unused = spec.vocab_size - tokens;
    const bool is_rounded = spec.vocab_size % 64 == 0 && unused < vocab_multiple;
    if (is_rounded || 200 * unused <= spec.vocab_size) return "";
    return concat("model.vocab_size is ", spec.vocab_size, ", but the tokenizer has ", tokens,
                  " tokens: ", with_separators(unused * spec.n_embd * (spec.tied_head ? 1 : 2)),
                  " of the ", with_separators(registry_of(spec).numel()),
                  " parameters are of no use; model.vocab_size=0 takes the tokenizer's size");
}

namespace {

/// Memory by purpose, with a column for each level.
std::string levels_table(const std::vector<Arena>& plans, const Device& device) {
    std::string table = formatted("  %-14s %14s %14s %14s\n", "", name_of(Recompute::none),
                                  name_of(Recompute::elementwise), name_of(Recompute::block));
    const auto row = [&](const std::string& name, auto bytes) {
        table += formatted(
            "  %-14s %14s %14s %14s\n", name.c_str(), format_bytes(bytes(plans[0])).c_str(),
            format_bytes(bytes(plans[1])).c_str(), format_bytes(bytes(plans[2])).c_str());
    };
    for (size_t i = 0; i < static_cast<size_t>(Purpose::count); ++i) {
        const auto purpose = static_cast<Purpose>(i);
        if (plans[0].bytes(purpose))
            row(label_of(purpose, device), [&](const Arena& plan) { return plan.bytes(purpose); });
    }
    row("total", [](const Arena& plan) { return plan.total_bytes(); });
    return table;
}

/// Memory of the largest GPU known, a B300.
constexpr uint64_t largest_gpu_bytes = 288'000'000'000;

/// The tokens of each step of a run that has not begun, or that decays from another run's steps.
TokenCount planned_tokens(const Config& config) {
    TokenCount tokens(config.batch.tokens_per_step);
    if (config.schedule.decay_from.empty()) {
        plan_steps(tokens, 0, config);
        return tokens;
    }
    // After the start, the other run's checkpoint may be gone
    const auto start = decay_start_to_copy(config);
    tokens = checkpoint_position(start ? *start : find_checkpoint(config.run_dir)).tokens;
    plan_steps(tokens, first_step_of(config), config);
    return tokens;
}

/// "run          5 steps, 640 tokens\n"
std::string length_lines(const Config& config, const TokenCount& tokens, int64_t steps) {
    const int64_t first = first_step_of(config);
    std::string text =
        concat("run          ", with_separators(steps - first), " steps, ",
               with_separators(tokens.before(steps) - tokens.before(first)), " tokens\n");
    if (first > 0)
        text += concat("             after the ", with_separators(first), " steps of ",
                       config.schedule.decay_from, ", which had ",
                       with_separators(tokens.before(first)), " tokens\n");
    if (const int64_t full = tokens.parts().back().first_step;
        config.batch.warmup_tokens > 0 && full > first)
        text += concat("             batch warm-up: ", with_separators(tokens.of_step(first)),
                       " tokens in the first step, ", with_separators(tokens.per_step()),
                       " from step ", with_separators(full + 1), " on\n");
    return text;
}

/// How long the run is, and how often it reads its data, as far as that is known where the data are
/// not here yet.
std::string run_lines(const Config& config, const DecoderSpec& spec) {
    const std::optional<DataUse> data = data_use_if_readable(config, spec.vocab_size);
    const TokenCount of_steps = planned_tokens(config);
    std::string text;
    if (config.schedule.epochs == 0 || data)
        text = length_lines(config, of_steps,
                            total_steps(config, data ? data->epoch_tokens() : 0, of_steps));
    if (config.data.train.empty()) return text;
    if (!data)
        return text +
               "data         cannot be read here, so that the passes over it are not known\n";
    const int64_t tokens = scheduled_tokens(config, data->epoch_tokens())
                               .value_or(of_steps.before(config.schedule.steps));
    const std::vector<SourceUse> planned = data->after(data->order(), tokens);
    for (const SourceUse& source : planned)
        if (!std::isnan(source.passes))
            text += concat("data         ", describe_passes(source.passes), " over ", source.name,
                           first_step_of(config) > 0 ? ", with the steps before" : "", "\n");
    if (const std::string note = note_on_repetition(planned); !note.empty())
        text += "note         " + note + "\n";
    return text;
}

/// What Muon adds to a step. step_flops: the model's in a step, over all ranks.
std::string muon_line(const RunShape& shape, double step_flops) {
    double all = 0, most = 0;
    int64_t matrices = 0;
    for (const int rank : shape.mesh.first_ranks(Axis::pipeline)) {
        Arena counting = Arena::counting(Device{});
        const ParameterBuffers buffers(counting, registry_of_rank(shape, rank).parameters,
                                       shape.dtype, ParameterBuffers::Use::training,
                                       sharding_of(shape, rank));
        std::map<int, double> of_owner;
        for (const OwnedMatrix& m : owned_matrices(buffers)) {
            const MatrixGroup group{{m.rows.n, m.cols}, 1, nullptr};
            const double flops =
                cost_of(NewtonSchulz{.groups = {&group, 1},
                                     .coefficients = shape.config.optimizer.muon_coefficients})
                    .flops;
            all += flops, of_owner[m.owner] += flops, ++matrices;
        }
        for (const auto& [owner, flops] : of_owner) most = std::max(most, flops);
    }
    const double of_rank = step_flops / shape.mesh.world();
    return formatted(
        "Muon         %s matrices, %.4g FLOPs per step; at most %.4g on a rank, %.1f %% of its "
        "share of a step's\n",
        with_separators(matrices).c_str(), all, most, 100 * most / of_rank);
}

/// Model, FLOPs, step, run and device, one line each.
std::string describe_shape(const RunShape& shape, const PlanTarget& target) {
    const Config& config = shape.config;
    const DecoderSpec& spec = shape.spec;
    const int world = shape.mesh.world();
    const int T = config.sequence_length();
    const int64_t micro_batches = config.micro_batches_per_step();
    const int data_ranks = shape.mesh.size(Axis::data);
    const int64_t fewest = micro_batches / data_ranks,
                  most = (micro_batches + data_ranks - 1) / data_ranks;
    const int64_t parameters = registry_of(spec).numel();
    const double flops = spec.flops_per_token(T);
    std::string text = concat("model        ", spec.n_layer, " layers, ", spec.n_head, " heads of ",
                              spec.head_size, ", ", spec.n_embd, " channels, ", spec.n_ctx,
                              " positions, vocabulary ", spec.vocab_size, " (", spec.padded_vocab(),
                              " in memory)\n", "parameters   ", with_separators(parameters));
    if (const int64_t idle = spec.idle_parameters(); idle > 0)
        text += concat(", of which a token passes ", with_separators(parameters - idle));
    text += "\n";
    const auto weights = static_cast<uint64_t>(parameters) * size_of(shape.dtype);
    if (weights > largest_gpu_bytes && config.parallel.zero.value() < 3 &&
        config.parallel.tensor == 1)
        text += concat("note         its weights alone take ", format_bytes(weights),
                       ", which no GPU has; parallel.zero=3 splits them over ranks\n");
    text += formatted(
        "FLOPs        %.4g per token (6·N + 6·L·C·T, causal attention counted half), %.4g per "
        "step\n",
        flops, flops * static_cast<double>(config.batch.tokens_per_step));
    if (config.optimizer.name == OptimizerName::muon)
        text += muon_line(shape, flops * static_cast<double>(config.batch.tokens_per_step));
    text += concat("step         ", with_separators(config.batch.tokens_per_step),
                   " tokens = ", micro_batches, " micro-batch", micro_batches == 1 ? "" : "es",
                   " of ", config.batch.micro_batch, " × ", T, " tokens, on ", world, " rank",
                   world == 1
                       ? ""
                       : concat("s: ", fewest, most == fewest ? "" : concat(" to ", most), " each"),
                   "\n");
    if (world > 1) text += traffic_line(shape) + shares_line(shape, target);
    text += run_lines(config, spec);
    text += concat("device       ",
                   !target.is_here()         ? concat(target.gpu, ", which is not here")
                   : target.device.is_cuda() ? "CUDA"
                                             : "CPU",
                   ", ", name_of(shape.dtype), "\n");
    if (const std::vector<Fp8Product> products = fp8_products(shape); !products.empty())
        text +=
            concat("precision    ", described(products, fp8_options(config), shape.dtype), "\n");
    return text;
}

}  // namespace

namespace {

/// Which stage of ZeRO was chosen, and for which speed of the link; empty if it is given.
std::string stage_text(const Config& given, const Fit& fit, const Speeds& speeds) {
    if (given.parallel.zero) return "";
    const std::string stage = concat(", parallel.zero = ", fit.zero);
    if (speeds.link == 0) return stage;
    return concat(stage, " (for a link of ", formatted("%.0f", speeds.link / 1e9),
                  " GB/s, which is assumed; a run measures its own)");
}

/// " to each of 2 ranks" that share the memory of this machine.
std::string sharing_text(const PlanTarget& target, int world) {
    const int ranks = local_ranks(target, world);
    return ranks == 1 ? "" : concat(" to each of ", ranks, " ranks");
}

/// "23.40 GiB are available here to each of 2 ranks"
std::string host_text(const PlanTarget& target, uint64_t bytes, int world) {
    return concat(format_bytes(bytes), " are available here", sharing_text(target, world));
}

/// What is chosen, or asked for, to be in the host's memory.
std::string offload_text(const Config& given, const Fit& fit, const PlanTarget& target,
                         const Speeds& speeds, const PlanReport& report, int world) {
    std::string text;
    for (const auto& [is_offloaded, name] :
         {std::pair{fit.offload.optimizer, "optimizer"}, {fit.offload.activations, "activations"}})
        if (is_offloaded) text += (text.empty() ? "" : " and ") + std::string(name);
    if (text.empty()) return "";
    std::string link;
    if (!offload_of(given) && speeds.host > 0)
        link = concat(", for ", formatted("%.0f", speeds.host / 1e9), " GB/s to it, ",
                      target.is_here() ? "measured" : "assumed");
    return concat(", memory.offload = ", text, " (",
                  format_bytes(static_cast<uint64_t>(fit.offloaded)), " of the host's memory",
                  target.is_here() && report.available.host != unlimited_memory
                      ? concat(", of which ", host_text(target, report.available.host, world))
                      : "",
                  link, ")");
}

/// "23.40 GiB available here"
std::string available_text(const PlanTarget& target, uint64_t bytes, int world) {
    if (bytes == unlimited_memory) return "an unknown amount available here";
    // Each rank has a GPU of its own.
    const std::string sharing = target.device.is_cuda() ? "" : sharing_text(target, world);
    return concat(format_bytes(bytes), " ",
                  target.is_here() ? "available here" + sharing
                                   : concat("that the ", target.gpu, " (",
                                            format_bytes(target.memory), ") should have free"));
}

}  // namespace

PlanReport plan_report(const Config& given, const PlanTarget& target, int world) {
    const Device& device = target.device;
    // Where only a GPU's memory is known, nobody knows what the GPU can do.
    const bool is_known = target.is_here() || target.flops > 0;
    if (const std::string problem = fp8_problem(
            given, target.is_here() && device.is_cuda() ? device_name(device) : target.gpu,
            is_known ? architecture(device) : 0);
        !problem.empty())
        throw Error(problem);
    const std::optional<Tokenizer> tokenizer = tokenizer_there(given);
    const Tokenizer* known = tokenizer ? &*tokenizer : nullptr;
    const DecoderSpec spec = spec_of(given, vocab_size_of(given, known));
    const RunShape asked(given, spec, resolve_dtype(given.precision.dtype, device), Recompute::none,
                         world);
    PlanReport report;
    report.available = memory_on(target, asked.mesh);
    const Speeds speeds = planned_speeds(target, report.available, asked);
    const Fit fit = fit_into(report.available, asked, device, speeds);
    RunShape shape = with_choices(asked, fit);
    shape.config.checkpoint.async = saves_in_background(shape, device, report.available);

    std::vector<Arena> plans;
    for (const Recompute level : recompute_levels)
        plans.push_back(plan_memory(shape.with_recompute(level), device));
    report.needed = most_memory(shape, device);
    const bool fits = report.needed.fits(report.available);
    const std::string note = note_on_vocabulary(given, spec, known);
    report.text = concat(
        describe_shape(shape, target), note.empty() ? "" : "note         " + note + "\n",
        "\nmemory of each rank, by recompute level\n", levels_table(plans, device),
        pipeline_table(shape, memory_of_stages(shape, device)),
        "\nbatch.micro_batch = ", fit.micro_batch, ", memory.recompute = ", name_of(fit.recompute),
        stage_text(given, fit, speeds), offload_text(given, fit, target, speeds, report, world),
        shape.config.saves_in_background() ? ", checkpoint.async = on" : "", ": ",
        format_bytes(report.needed.device), " of ",
        available_text(target, report.available.device, world), fits ? "" : ": DOES NOT FIT", "\n");
    if (fits) return report;
    const bool host_is_short = report.needed.device <= report.available.device;
    report.problem = concat(
        "the run needs ",
        host_is_short
            ? concat(format_bytes(report.needed.host), " of the host's memory on each rank, and ",
                     host_text(target, report.available.host, world), "; ")
            : concat(format_bytes(report.needed.device), " of memory on each rank, and ",
                     target.is_here() && !device.is_cuda()
                         ? host_text(target, report.available.device, world)
                     : target.is_here()
                         ? format_bytes(report.available.device) + " are available here"
                         : "the " + target.gpu + " should have " +
                               format_bytes(report.available.device) + " free",
                     "; "),
        change_that_fits(asked, device, report.available));
    return report;
}

std::string planned_picture(const Config& given, const PlanTarget& target, int world) {
    if (given.parallel.pipeline == 1)
        throw Error(
            "--picture draws the schedule of a pipeline, and parallel.pipeline is 1; set it to 2 "
            "or more");
    const Device& device = target.device;
    const RunShape asked(given, spec_of(given, vocab_size_of(given)),
                         resolve_dtype(given.precision.dtype, device), Recompute::none, world);
    const DeviceAndHost available = memory_on(target, asked.mesh);
    const Speeds speeds = planned_speeds(target, available, asked);
    const RunShape shape = with_choices(asked, fit_into(available, asked, device, speeds));
    return schedule_picture(shape, memory_of_stages(shape, device));
}

}  // namespace train_gpt
