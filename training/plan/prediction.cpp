#include "training/plan/prediction.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/error.h"
#include "base/formatted.h"
#include "base/printable.h"
#include "training/plan/datasheet.h"
#include "training/plan/fit.h"
#include "training/plan/memory_plan.h"
#include "training/schedule.h"

namespace train_gpt {

PlanTarget target_of(const Cluster& cluster) {
    const auto memory = static_cast<uint64_t>(cluster.memory);
#ifdef TRAIN_GPT_CUDA
    if (cluster.is_cuda()) return gpu_elsewhere(cluster.gpu, memory);
#endif
    PlanTarget target(Device{.planned_architecture = cluster.is_cuda() ? cluster.architecture : 0});
    target.gpu = cluster.is_cuda()        ? cluster.gpu
                 : cluster.name == "this" ? "machine"
                                          : cluster.name;
    target.memory = memory;
    target.multiprocessors = cluster.multiprocessors;
    target.flops = std::max(cluster.flops_bf16, cluster.flops_fp32);
    target.host = cluster.host_link;
    return target;
}

bool is_fp8(const Config& config) { return config.precision.fp8 != Fp8Recipe::off; }

RunShape shape_on(const Config& given, const Cluster& cluster, int world) {
    const int per_node = cluster.ranks_per_node;
    if (world > per_node && world % per_node != 0)
        throw Error("--world ", world, " does not fill whole nodes of ", cluster.name,
                    ", which have ", per_node, " ranks each; the nearest numbers are ",
                    world / per_node * per_node, " and ", (world / per_node + 1) * per_node);
    const int tensor = given.parallel.tensor;
    if (tensor > per_node && !given.parallel.allow_tensor_across_nodes)
        throw Error("parallel.tensor = ", tensor, " is more than the ", per_node,
                    " ranks of a node of ", cluster.name, "; set it to at most ", per_node,
                    ", or set parallel.allow_tensor_across_nodes to on");
    if (const std::string problem =
            fp8_problem(given, cluster.name, cluster.is_cuda() ? cluster.architecture : 0);
        !problem.empty())
        throw Error(problem);
    const bool has_bf16 = cluster.flops_bf16 >= cluster.flops_fp32 && cluster.flops_bf16 > 0;
    const std::optional<DType> wanted = given.precision.dtype;
    const DType dtype = wanted.value_or(has_bf16 ? DType::bf16 : DType::fp32);
    return {given, spec_of(given, vocab_size_of(given)), dtype, Recompute::none, world};
}

Speeds speeds_on(const Cluster& cluster, const RunShape& shape) {
    constexpr double bucket = 64 << 20;  // bytes of an exchange
    const int data = shape.mesh.size(Axis::data);
    return {.flops = std::max(cluster.flops(shape.dtype), cluster.flops_fp32),
            .link = data > 1 ? cluster.bus_bandwidth(
                                   bucket, data,
                                   shape.mesh.size(Axis::tensor) * shape.mesh.size(Axis::context))
                             : 0,
            .host = cluster.host_link};
}

RunShape choose_for(const RunShape& shape, const Cluster& cluster) {
    const PlanTarget target = target_of(cluster);
    const DeviceAndHost available = memory_on(target, shape.mesh);
    const Speeds speeds =
        deciding_speeds(speeds_on(cluster, shape), available, shape, target.device);
    RunShape chosen = with_choices(shape, fit_into(available, shape, target.device, speeds));
    chosen.config.checkpoint.async = saves_in_background(chosen, target.device, available);
    return chosen;
}

namespace {

/// What a rank computes in a step, by what it is spent on; the rank that computes longest.
struct Busiest {
    PassTime time = {};
    double optimizer = 0, muon = 0, offload = 0;
    size_t rank = 0;
};
Busiest busiest_of(const StepWork& work) {
    Busiest most;
    for (size_t r = 0; r < work.ranks.size(); ++r) {
        Busiest rank{.optimizer = work.ranks[r].optimizer,
                     .muon = work.ranks[r].muon,
                     .offload = work.ranks[r].offload,
                     .rank = r};
        for (const std::vector<UnitWork>& stage : work.ranks[r].stages)
            for (const UnitWork& unit : stage) {
                rank.time += unit.forward;
                rank.time += unit.backward_inputs;
                rank.time += unit.backward_weights;
            }
        rank.time = double{1} * work.schedule.shape.micro_batches * rank.time;
        rank.offload += rank.time.offload;
        if (rank.time.sum() > most.time.sum()) most = rank;
    }
    return most;
}

/// Nine of ten published rows of models that the fit had not seen lie within this factor on such
/// GPUs (docs/planning.md). What no row checks gets twice as much.
double error_band(const Cluster& cluster, bool is_checked) {
    const bool is_consumer =
        cluster.is_cuda() &&
        (cluster.architecture == 86 || cluster.architecture == 89 || cluster.architecture == 120);
    const double of_gpu = is_consumer ? 0.35 : cluster.architecture == 100 ? 0.18 : 0.13;
    return is_checked && cluster.note.empty() ? of_gpu : 2 * of_gpu;
}

}  // namespace

std::string fp8_note(const std::string& gpu, int from, int width) {
    if (from == 0) return concat("fp8 does not pay on ", gpu);
    return concat("fp8 pays from a width of ", from,
                  ": from there on products gain more than rounding their operands takes",
                  width < from ? concat("; not for this model, whose width is ", width) : "");
}

std::string fp8_note(const PlanTarget& target, int width) {
    if (target.is_here() && !target.device.is_cuda()) return "";
    const std::string name = target.is_here() ? device_name(target.device) : target.gpu;
    const Gpu* const gpu = gpu_called(
        name, target.is_here() ? multiprocessors(target.device) : target.multiprocessors);
    if (!gpu)
        return concat("from which width fp8 pays is not known for ",
                      target.is_here() ? name : "this GPU", ", whose datasheet is not at hand");
    return fp8_note(std::string(gpu->name), fp8_pays_from(*gpu), width) + ", by its datasheet";
}

Prediction predict(const RunShape& shape, const Cluster& cluster,
                   const PredictionOptions& options) {
    const bool fp8 = is_fp8(shape.config);
    const WorkOptions given{.fp8 = fp8};
    const StepWork work = step_work(shape, cluster, given);
    const SimulatedStep step = simulate_step(work);
    const Config& config = shape.config;
    Prediction p;
    p.step_seconds = step.seconds;
    p.bubble = step.bubble;
    const bool is_mixture = shape.spec.experts.n_expert > 0,
               offloads = cluster.is_cuda() && !(shape.offload() == Offload{});
    const double band = error_band(cluster, !is_mixture && !offloads);
    p.low = step.seconds * (1 - band), p.high = step.seconds * (1 + band);
    const auto tokens = static_cast<double>(config.batch.tokens_per_step);
    p.tokens_per_second = tokens / step.seconds / shape.mesh.world();
    p.mfu = p.tokens_per_second * shape.spec.flops_per_token(config.sequence_length()) /
            cluster.flops(shape.dtype);
    p.dtype = shape.dtype;
    for (const Axis axis : all_axes) {
        if (shape.mesh.size(axis) == 1 &&
            !(axis == Axis::data && shape.mesh.size(Axis::context) > 1))
            continue;
        WorkOptions without = given;
        without.without = axis;
        const double seconds = simulate_step(step_work(shape, cluster, without)).seconds;
        p.exposed[name_of(axis)] = std::max(0.0, step.seconds - seconds);
    }
    const Busiest busiest = busiest_of(work);
    p.optimizer = busiest.optimizer, p.muon = busiest.muon, p.offload = busiest.offload;
    p.shares = {{"products", busiest.time.products / step.seconds},
                {"attention", busiest.time.attention / step.seconds},
                {"memory bandwidth", busiest.time.memory / step.seconds},
                {"optimizer", busiest.optimizer / step.seconds},
                {"offloading", busiest.offload / step.seconds}};
    // What is exposed along the pipeline is a part of the bubble.
    for (const auto& [axis, seconds] : p.exposed)
        if (axis != name_of(Axis::pipeline))
            p.shares["exchanges along " + axis] = seconds / step.seconds;
    // Exchanges that are exposed may be a part of the wait for a message, too.
    double named = 0;
    for (const auto& [name, share] : p.shares) named += share;
    p.shares["pipeline bubble"] =
        std::clamp(step.waited[busiest.rank] / step.seconds, 0.0, std::max(0.0, 1 - named));
    p.bound = std::max_element(p.shares.begin(), p.shares.end(), [](const auto& a, const auto& b) {
                  return a.second < b.second;
              })->first;
    if (config.schedule.steps > 0 || config.schedule.tokens > 0) {
        const double steps = config.schedule.steps > 0
                                 ? static_cast<double>(config.schedule.steps)
                                 : static_cast<double>(config.schedule.tokens) / tokens;
        p.days = steps * step.seconds / 86400;
        p.gpu_hours = *p.days * 24 * shape.mesh.world();
        if (options.price) p.cost = *p.gpu_hours * *options.price;
    }
    const PlanTarget target = target_of(cluster);
    const Arena plan = plan_memory(shape, target.device);
    for (size_t i = 0; i < static_cast<size_t>(Purpose::count); ++i)
        if (const auto purpose = static_cast<Purpose>(i); plan.bytes(purpose) > 0)
            p.memory[label_of(purpose, plan.device())] = plan.bytes(purpose);
    p.memory["total"] = plan.total_bytes();
    p.memory_available = memory_on(target, shape.mesh).device;
    if (cluster.is_cuda() && !target.device.is_cuda())
        p.notes.emplace_back(
            "this build has no CUDA kernels, so memory is counted with a CPU's workspaces");
    if (!cluster.note.empty()) p.notes.push_back(printable(cluster.note));
    if (is_mixture || offloads)
        p.notes.push_back(concat("no published speed of ",
                                 is_mixture ? "a mixture" : "a run that offloads",
                                 " was at hand to check the prediction"));
    if (fp8) {
        p.fp8_pays_from = fp8_pays_from(cluster);
        p.fp8_pays = p.fp8_pays_from > 0 && shape.spec.n_embd >= p.fp8_pays_from;
        p.notes.push_back(fp8_note(cluster.name, p.fp8_pays_from, shape.spec.n_embd));
        p.notes.emplace_back("fp8's efficiencies are from published runs of other programs");
    }
    return p;
}

namespace {

/// Four digits: "120.7", "19,600".
std::string four_digits(double value) {
    const std::string text = formatted("%.4g", value);
    const double rounded = std::strtod(text.c_str(), nullptr);
    return rounded >= 1e4 && rounded < 1e18 ? with_separators(static_cast<uint64_t>(rounded))
                                            : text;
}

}  // namespace

std::string to_text(const Prediction& p, const Cluster& cluster) {
    std::string text =
        concat("\npredicted on ", cluster.name, ": ", four_digits(1e3 * p.step_seconds),
               " ms a step (", four_digits(1e3 * p.low), " to ", four_digits(1e3 * p.high), ")\n");
    text +=
        formatted("  %-22s %s tokens/s of a rank, MFU %.1f %% (6·N + 6·L·C·T, of the %s peak)\n",
                  "speed", four_digits(p.tokens_per_second).c_str(), 100 * p.mfu, name_of(p.dtype));
    text += concat("  ", formatted("%-22s ", "bounded by"), p.bound, "\n");
    for (const auto& [name, share] : p.shares)
        if (share >= 0.0005)
            text += formatted("  %-22s %.1f %% of a step\n", name.c_str(), 100 * share);
    if (p.days)
        text += formatted("  %-22s %s GPU-hours, %.2f days\n", "the run",
                          four_digits(*p.gpu_hours).c_str(), *p.days);
    if (p.cost) text += formatted("  %-22s %s\n", "cost", four_digits(*p.cost).c_str());
    for (const std::string& note : p.notes) text += "  note: " + note + "\n";
    return text;
}

Json to_json(const Prediction& p) {
    Json exposed = Json::object(), memory = Json::object(), shares = Json::object();
    for (const auto& [axis, seconds] : p.exposed) exposed[axis] = 1e3 * seconds;
    for (const auto& [purpose, bytes] : p.memory) memory[purpose] = bytes;
    for (const auto& [name, share] : p.shares) shares[name] = share;
    Json json{
        {"step_ms", 1e3 * p.step_seconds},
        {"step_ms_low", 1e3 * p.low},
        {"step_ms_high", 1e3 * p.high},
        {"tokens_per_second_per_gpu", p.tokens_per_second},
        {"mfu", p.mfu},
        {"mfu_convention", concat("6N + 6LCT, causal attention counted half, of the dense peak of ",
                                  name_of(p.dtype))},
        {"memory_bytes", memory},
        {"memory_available_bytes", p.memory_available},
        {"exposed_communication_ms", exposed},
        {"bubble_fraction", p.bubble},
        {"shares", shares},
        {"bound", p.bound},
        {"optimizer_ms", 1e3 * p.optimizer},
        {"muon_ms", 1e3 * p.muon},
        {"offload_ms", 1e3 * p.offload}};
    const auto add = [&](const char* key, const std::optional<double>& value) {
        json[key] = value ? Json(*value) : Json();
    };
    if (p.fp8_pays_from > 0)
        json["fp8_pays_from_width"] = p.fp8_pays_from, json["fp8_pays"] = p.fp8_pays;
    add("gpu_hours", p.gpu_hours), add("days", p.days), add("cost", p.cost);
    json["notes"] = p.notes;
    return json;
}

}  // namespace train_gpt
