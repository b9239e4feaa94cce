// Writing reports.
#pragma once
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "training/report/recorded_run.h"
#include "training/report/report_arguments.h"
#include "training/watch/progress.h"

namespace train_gpt {

constexpr const char* report_file = "report.html";

/// Writes the page and the picture, and returns what to print. Throws Error if a folder is not a
/// run's folder, if a file cannot be written, if there are too many runs, or if a run is named
/// twice.
std::string write_report(const ReportOptions& options);

/// Serves the page about runs, which follows them, until stop() is true. Nothing is written. say():
/// gets what to print once the page can be opened. Throws Error as write_report() does, and if it
/// cannot listen.
void serve_report(const ReportOptions& options, const std::function<void(const std::string&)>& say,
                  const std::function<bool()>& stop);

/// The rows of a table that the page about an active run keeps in memory; at times twice as many.
constexpr size_t most_live_rows = 20'000;

/// The page about an active run, in its folder. `train_gpt report` makes the page of a long run
/// from all of its lines.
class LiveReport {
  public:
    /// writes: whether this rank writes; only one of several ranks does.
    LiveReport(std::filesystem::path run_dir, bool writes, Progress& progress);

    /// Writes the page from what the folder has now. Reads only what is new since the last call.
    /// The first failure is printed with its reason; the run continues in any case.
    void write();

  private:
    std::filesystem::path run_dir_;
    bool writes_, failed_ = false;
    Progress& progress_;
    std::vector<RecordedRun> run_;  // none before the first step is logged
};

}  // namespace train_gpt
