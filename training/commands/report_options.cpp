#include "training/commands/report_options.h"

#include <CLI/CLI.hpp>

#include "training/commands/shared_options.h"

namespace train_gpt {

void add_report_command(CLI::App& app, CommandLine& line) {
    CLI::App* report = app.add_subcommand(
        "report", "Write a page about one or several runs: curves, samples, configuration");
    report->add_option("runs", line.report.runs, "Folders of runs")
        ->required()
        ->transform(path())
        ->type_name("RUN");
    report
        ->add_option(
            "--out", line.report.out,
            "File to write. Default: report.html, in the folder of a single run, else here")
        ->transform(path())
        ->type_name("FILE");
    report
        ->add_option("--picture", line.report.picture,
                     "Also write the loss alone, as a picture (SVG)")
        ->transform(path())
        ->type_name("FILE");
    report
        ->add_option("--tolerance", line.report.tolerance,
                     "Write no page; compare two runs step by step: losses, gradient norms, "
                     "fingerprints. Exits with 1 if they differ by more, relatively. Default: 0, "
                     "the same numbers")
        ->expected(0, 1)
        ->default_str("0")
        ->check(from_to(0, 1e9))
        ->type_name("X");
    report
        ->add_option("--gap", line.report.gap,
                     "Write no page; compare what two runs learned: the mean gap of their losses. "
                     "Exits with 1 if it is more, in nats, in the last third, in the last sixth or "
                     "in the last validation loss, or if it grows in the last third")
        ->check(from_to(0, 1e9))
        ->type_name("NATS");
    CLI::Option* live = report->add_flag(
        "--live", line.report.live,
        "Write no file; serve the page to browsers on this machine. It follows the runs until "
        "Ctrl-C");
    report->add_option("--port", line.report.port, "With --live: the port; 0: any that is free")
        ->check(CLI::Range(0, 65535))
        ->needs(live)
        ->capture_default_str()
        ->type_name("PORT");
    report
        ->add_option("--address", line.report.address,
                     "With --live: the numeric address to serve it at; 0.0.0.0: all of this "
                     "machine's, so that others can read the page")
        ->needs(live)
        ->capture_default_str()
        ->type_name("ADDRESS");
    for (const char* other : {"--out", "--picture", "--tolerance", "--gap"})
        live->excludes(report->get_option(other));
}

}  // namespace train_gpt
