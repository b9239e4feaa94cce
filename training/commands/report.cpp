#include "training/report/report.h"

#include <cstdio>

#include "base/printable.h"
#include "training/commands/commands.h"
#include "training/interrupt.h"
#include "training/report/compare_runs.h"

namespace train_gpt::commands {

int report(const CommandLine& line) {
    if (line.report.tolerance || line.report.gap) {
        const auto &a = line.report.runs[0], &b = line.report.runs[1];
        const ComparisonReport comparison =
            line.report.gap ? report_on_gap(a, b, *line.report.gap)
                            : report_on_comparison(a, b, *line.report.tolerance);
        std::printf("%s\n", printable(comparison.text).c_str());
        return comparison.within ? 0 : 1;
    }
    if (line.report.live) {
        const CtrlCWatch ctrl_c;
        serve_report(
            line.report,
            [](const std::string& text) {
                std::printf("%s\n", printable(text).c_str());
                std::fflush(stdout);
            },
            [&] { return ctrl_c.pressed(); });
        std::printf("\n");
        return 0;
    }
    std::printf("%s\n", printable(write_report(line.report)).c_str());
    return 0;
}

}  // namespace train_gpt::commands
