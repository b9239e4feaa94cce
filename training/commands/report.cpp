#include "training/report/report.h"

#include <csignal>
#include <cstdio>

#include "base/printable.h"
#include "base/terminal_text.h"
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
        print_line(stdout, printable(comparison.text));
        return comparison.within ? 0 : 1;
    }
    if (line.report.live) {
        const SignalWatch ends({SIGINT, SIGTERM});
        serve_report(
            line.report,
            [](const std::string& text) {
                print_line(stdout, printable(text));
                std::fflush(stdout);
            },
            [&] { return ends.came(); });
        print_line(stdout, "\nthe page is no longer served; the runs are not affected");
        return 0;
    }
    print_line(stdout, printable(write_report(line.report)));
    return 0;
}

}  // namespace train_gpt::commands
