#include "training/plan/plan.h"

#include <cstdio>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "training/commands/commands.h"
#include "training/config/load_config.h"
#include "training/plan/pipeline_plan.h"

namespace train_gpt::commands {

int plan(const CommandLine& line) {
    const Config config = load_config(line, line.world);
    const bool is_elsewhere = !line.gpu.empty() || line.gpu_bytes > 0;
    if (is_elsewhere && config.device == "cpu")
        throw Error(
            "--gpu and --memory are for a GPU, but device is \"cpu\"; leave it at \"auto\"");
    const PlanTarget target = is_elsewhere ? gpu_elsewhere(line.gpu, line.gpu_bytes)
                                           : PlanTarget(open_device(config.device));
    if (!line.picture.empty())
        write_file(line.picture, planned_picture(config, target, line.world));
    const PlanReport report = plan_report(config, target, line.world);
    std::fputs(report.text.c_str(), stdout);
    if (!line.picture.empty()) std::printf("wrote %s\n", printable(line.picture).c_str());
    std::fflush(stdout);
    if (!report.problem.empty()) throw Error(report.problem);
    return 0;
}

}  // namespace train_gpt::commands
