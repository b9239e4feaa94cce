// Writing reports.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "training/report/options.h"
#include "training/report/recorded_run.h"
#include "training/watch/progress.h"

namespace train_gpt {

constexpr const char* report_file = "report.html";

/// Writes the page and the picture, and returns what to print. Throws Error, in a sentence, for
/// what is not the folder of a run or cannot be written, and for too many runs or the same one
/// twice.
std::string write_report(const ReportOptions& options);

/// The rows of a table that the page about an active run keeps in memory; at times twice as many.
constexpr size_t most_live_rows = 20'000;

/// The page about an active run, in its folder. `train_gpt report` makes the page of a long run from
/// all of its lines.
class LiveReport {
  public:
    /// Of several ranks only one writes.
    LiveReport(std::filesystem::path run_dir, bool writes, Progress& progress);

    /// Writes the page from what the folder has now; reads only what is new since the last call. If
    /// that fails, prints why, once, and the run continues.
    void write();

  private:
    std::filesystem::path run_dir_;
    bool writes_, failed_ = false;
    Progress& progress_;
    std::vector<RecordedRun> run_;  // none before the first step is logged
};

}  // namespace train_gpt
