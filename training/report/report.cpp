#include "training/report/report.h"

#include <exception>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "training/report/page.h"
#include "training/report/picture.h"

namespace train_gpt {

namespace fs = std::filesystem;

std::string write_report(const ReportOptions& options) {
    if (options.runs.size() > most_runs)
        throw Error("a report compares at most ", most_runs, " runs, and ", options.runs.size(),
                    " are named; name fewer");
    std::vector<RecordedRun> runs;
    std::set<fs::path> seen;
    for (const std::string& folder : options.runs) {
        runs.emplace_back(folder);
        if (!seen.insert(fs::canonical(folder)).second)
            throw Error(folder, " is named twice; name each run once");
    }
    fs::path out = options.out;
    if (out.empty()) out = runs.size() == 1 ? runs[0].folder() / report_file : report_file;
    std::string said;
    for (const std::string& note : notes_on_comparison(runs)) said += "note: " + note + "\n";
    for (const RecordedRun& run : runs)
        for (const std::string& note : run.notes()) said += "note: " + note + "\n";
    write_file(out, report_page(runs));
    if (!options.picture.empty()) write_file(options.picture, loss_picture(runs));
    return said + "wrote " + out.string() +
           (options.picture.empty() ? "" : " and " + options.picture);
}

LiveReport::LiveReport(fs::path run_dir, bool writes, Progress& progress)
    : run_dir_(std::move(run_dir)), writes_(writes), progress_(progress) {}

void LiveReport::write() {
    std::error_code code;  // a run that has logged nothing yet has nothing to report
    const bool logged = fs::file_size(run_dir_ / "metrics.jsonl", code) > 0 && !code;
    if (!writes_ || !logged) return;
    try {
        if (run_.empty())
            run_.emplace_back(run_dir_, most_live_rows);
        else
            run_.front().update();
        write_file(run_dir_ / report_file, report_page(run_));
    } catch (const std::exception& error) {
        if (!std::exchange(failed_, true))
            progress_.warn(
                concat(message_of(error), "; the run continues without a current ", report_file));
    }
}

}  // namespace train_gpt
