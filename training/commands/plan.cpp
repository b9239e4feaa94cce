#include "training/plan.h"

#include <cstdio>

#include "base/error.h"
#include "training/commands/commands.h"

namespace train_gpt::commands {

int plan(const CommandLine& line) {
    const Config config = load_config(line.config, line.overrides);
    const PlanReport report = plan_report(config, open_device(config.device), line.world);
    std::fputs(report.text.c_str(), stdout);
    std::fflush(stdout);
    if (!report.problem.empty()) throw Error(report.problem);
    return 0;
}

}  // namespace train_gpt::commands
