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
    const Device device = open_device(config.device);
    if (!line.picture.empty())
        write_file(line.picture, planned_picture(config, device, line.world));
    const PlanReport report = plan_report(config, device, line.world);
    std::fputs(report.text.c_str(), stdout);
    if (!line.picture.empty()) std::printf("wrote %s\n", printable(line.picture).c_str());
    std::fflush(stdout);
    if (!report.problem.empty()) throw Error(report.problem);
    return 0;
}

}  // namespace train_gpt::commands
