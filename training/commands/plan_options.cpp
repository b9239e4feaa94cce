#include "training/commands/plan_options.h"

#include <CLI/CLI.hpp>

#include "training/commands/shared_options.h"

namespace train_gpt {

void add_plan_command(CLI::App& app, CommandLine& line, std::string& memory) {
    CLI::App* plan = app.add_subcommand(
        "plan", "Print parameters, FLOPs and memory of a run, without starting it");
    add_config(plan, line);
    plan->add_option("--world", line.world, "Number of ranks")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    plan->add_option("--local-ranks", line.ranks_here,
                     "How many of the ranks are on this machine and share its memory; without it, "
                     "one for each GPU or core")
        ->check(CLI::Range(1, 1 << 20));
    plan->add_option("--gpu", line.gpu,
                     "Plan for GPUs that are not here, such as rtx4090, by their datasheet")
        ->type_name("GPU")
        ->excludes("--local-ranks");
    plan->add_option("--memory", memory,
                     "Plan for GPUs that are not here, with so much memory each, such as 24GiB")
        ->type_name("SIZE")
        ->excludes("--local-ranks");
    plan->add_option(
            "--picture", line.picture,
            "Also draw the schedule of the pipeline, and the micro-batches in flight (SVG)")
        ->transform(path())
        ->type_name("FILE");
    auto& planning = line.planning;
    CLI::Option* cluster =
        plan->add_option("--cluster", planning.cluster,
                         "Predict a step's time on --world ranks of a cluster that need not be "
                         "here: h100-dgx, h200, a100-80, …; this: this machine, measured; or a "
                         "file (docs/planning.md)")
            ->type_name("NAME|FILE")
            ->excludes("--gpu")
            ->excludes("--memory")
            ->excludes("--local-ranks");
    plan->add_option("--price", planning.price, "Of an hour of one GPU: also print the run's cost")
        ->check(from_to(0, 1e6))
        ->needs(cluster);
    plan->add_flag("--json", planning.json, "Print the prediction as one JSON object")
        ->needs(cluster);
    cluster->excludes("--picture");
    plan->add_flag("--search", planning.search,
                   "Find the ten fastest meshes, ZeRO stages, micro-batches, recompute levels and "
                   "schedules that fit")
        ->needs(cluster)
        ->excludes("--price");
    plan->add_option("--trace", planning.trace,
                     "Write the predicted step as a timeline for https://ui.perfetto.dev (JSON)")
        ->transform(path())
        ->type_name("FILE")
        ->needs(cluster)
        ->excludes("--search");
}

}  // namespace train_gpt
