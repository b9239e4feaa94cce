#include "training/plan/plan.h"

#include <cstdio>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "base/terminal_text.h"
#include "training/commands/commands.h"
#include "training/config/load_config.h"
#include "training/plan/datasheet.h"
#include "training/plan/fit.h"
#include "training/plan/pipeline_plan.h"
#include "training/plan/prediction.h"
#include "training/plan/search.h"
#include "training/plan/simulated_trace.h"
#include "training/selfcheck.h"

namespace train_gpt::commands {

namespace {

/// Prints JSON as it is; of a table, a terminal gets long lines broken at words.
void print(const std::string& text, bool is_json = false) {
    std::fputs(text_for_terminal(text, is_json ? 0 : columns_of(stdout)).c_str(), stdout);
}

/// `plan --cluster`: how long a step takes there.
int plan_on_cluster(const CommandLine& line, Config config) {
    const auto& asked = line.planning;
    const Cluster cluster = asked.cluster == "this"
                                ? measure_this(open_device(config.device), line.world)
                                : find_cluster(asked.cluster);
    const PredictionOptions options{.price = asked.price};
    if (asked.search) {
        const SearchResult result = search(config, cluster, line.world);
        print(asked.json ? to_text(to_json(result)) + "\n" : to_text(result, cluster), asked.json);
        std::fflush(stdout);
        if (const std::string problem = problem_of(result); !problem.empty()) throw Error(problem);
        return 0;
    }
    const RunShape open = shape_on(config, cluster, line.world);
    const PlanTarget target = target_of(cluster);
    const RunShape shape = choose_for(open, cluster);
    config.precision.dtype = shape.dtype;
    config.batch.micro_batch = shape.config.batch.micro_batch;
    config.memory.recompute = shape.recompute;
    config.parallel.zero = shape.config.parallel.zero;
    config.memory.offload = shape.config.memory.offload;
    config.checkpoint.async = shape.config.checkpoint.async;
    const PlanReport report = plan_report(config, target, line.world);
    const Prediction prediction = predict(shape, cluster, options);
    print(asked.json ? to_text(to_json(prediction)) + "\n"
                     : report.text + to_text(prediction, cluster),
          asked.json);
    if (!asked.trace.empty()) {
        const StepWork work = step_work(shape, cluster, {.fp8 = is_fp8(config)});
        write_trace(asked.trace, simulate_step(work, true), shape.mesh.first_ranks(Axis::pipeline));
        if (!asked.json) std::printf("wrote %s\n", printable(asked.trace).c_str());
    }
    std::fflush(stdout);
    if (!report.problem.empty()) throw Error(report.problem);
    return 0;
}

/// From which width fp8 pays on the plan's GPU; empty without fp8.
std::string fp8_line(const PlanTarget& target, const Config& config) {
    if (!is_fp8(config)) return "";
    const std::string note = fp8_note(target, spec_of(config, vocab_size_of(config)).n_embd);
    return note.empty() ? "" : concat("\nnote         ", note, "\n");
}

/// The cluster that is shipped for the GPU of `plan --gpu`, if `world` ranks fill its nodes.
std::optional<Cluster> shipped_cluster(const CommandLine& line) {
    if (line.gpu.empty() || line.gpu_bytes > 0) return {};
    const std::string name = cluster_of_gpu(std::string(gpu_named(line.gpu).key));
    if (name.empty()) return {};
    Cluster cluster = find_cluster(name);
    const int per_node = cluster.ranks_per_node;
    if (line.world > per_node && line.world % per_node != 0) return {};
    return cluster;
}

/// A GPU that is not here, with the speeds of its cluster. So the plan chooses as a prediction for
/// the cluster does.
void take_speeds(PlanTarget& target, const Cluster& cluster, const Config& config, int world) {
    try {
        const Speeds speeds = speeds_on(cluster, shape_on(config, cluster, world));
        target.flops = speeds.flops, target.link = speeds.link, target.host = speeds.host;
    } catch (const Error&) {  // the plan says what is wrong with the configuration
    }
}

/// What `plan --gpu` adds: the time of a step on the cluster; without one, with fp8, from which
/// width fp8 pays.
std::string time_on(const std::optional<Cluster>& cluster, const PlanTarget& target,
                    const Config& config, int world) {
    if (!cluster) return fp8_line(target, config);
    try {
        const RunShape shape = choose_for(shape_on(config, *cluster, world), *cluster);
        return to_text(predict(shape, *cluster, {}), *cluster);
    } catch (const Error& error) {
        return concat("\nthe time of a step is not predicted: ", error.what(), "\n",
                      fp8_line(target, config));
    }
}

}  // namespace

int plan(const CommandLine& line) {
    const Config config = config_of_command(line, line.world);
    if (!line.planning.cluster.empty()) return plan_on_cluster(line, config);
    const bool is_elsewhere = !line.gpu.empty() || line.gpu_bytes > 0;
    if (is_elsewhere && config.device == "cpu")
        throw Error(
            "--gpu and --memory are for a GPU, but device is \"cpu\"; leave it at \"auto\"");
    PlanTarget target = is_elsewhere ? gpu_elsewhere(line.gpu, line.gpu_bytes)
                                     : PlanTarget(open_device(config.device));
    target.ranks_here = line.ranks_here;
    const std::optional<Cluster> cluster = shipped_cluster(line);
    if (cluster) take_speeds(target, *cluster, config, line.world);
    if (!line.picture.empty())
        write_file(line.picture, planned_picture(config, target, line.world));
    const PlanReport report = plan_report(config, target, line.world);
    print(report.text);
    if (!line.picture.empty()) std::printf("wrote %s\n", printable(line.picture).c_str());
    std::fflush(stdout);
    if (!report.problem.empty()) throw Error(report.problem);
    print(time_on(cluster, target, config, line.world));
    return 0;
}

}  // namespace train_gpt::commands
