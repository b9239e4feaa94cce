#include "training/report/report.h"

#include <exception>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "training/report/comparison_notes.h"
#include "training/report/page.h"
#include "training/report/page_data.h"
#include "training/report/page_server.h"
#include "training/report/picture.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

/// Gives runs whose folders have the same name as much of their paths as tells them apart.
void tell_apart(std::vector<RecordedRun>& runs) {
    std::vector<fs::path> names, rest;  // of each run: its name, and the folders above
    for (const RecordedRun& run : runs) {
        // As name() sees the path, which may lead through symbolic links.
        const fs::path folder = fs::absolute(run.folder() / "").lexically_normal().parent_path();
        names.push_back(run.name());
        rest.push_back(folder.parent_path());
    }
    for (bool again = true; std::exchange(again, false);) {
        std::map<fs::path, std::vector<size_t>> alike;
        for (size_t r = 0; r < runs.size(); ++r) alike[names[r]].push_back(r);
        for (const auto& [name, of] : alike)
            for (const size_t r : of)
                if (of.size() > 1 && rest[r].has_filename()) {
                    names[r] = rest[r].filename() / names[r];
                    rest[r] = rest[r].parent_path();
                    again = true;
                }
    }
    for (size_t r = 0; r < runs.size(); ++r) runs[r].rename(names[r]);
}

std::vector<RecordedRun> open_runs(const ReportOptions& options, size_t most_rows) {
    if (options.runs.size() > most_runs)
        throw Error("a report compares at most ", most_runs, " runs, and ", options.runs.size(),
                    " are named; name fewer");
    std::vector<RecordedRun> runs;
    std::set<fs::path> seen;
    for (const std::string& folder : options.runs) {
        runs.emplace_back(folder, most_rows);
        if (!seen.insert(fs::canonical(folder)).second)
            throw Error(folder, " is named twice; name each run once");
    }
    tell_apart(runs);
    return runs;
}

/// A path by which a file is known, however it is spelled, and also before the file exists.
fs::path whole_path(const fs::path& file) { return fs::weakly_canonical(fs::absolute(file)); }

}  // namespace

std::string write_report(const ReportOptions& options) {
    std::vector<RecordedRun> runs = open_runs(options, std::numeric_limits<size_t>::max() / 2);
    fs::path out = options.out;
    if (out.empty()) out = runs.size() == 1 ? runs[0].folder() / report_file : report_file;
    if (!options.picture.empty() && whole_path(out) == whole_path(options.picture))
        throw UsageError("--picture names the page, ", out.string(),
                         "; give the picture a file of its own");
    std::string said;
    for (const std::string& note : notes_on_comparison(runs)) said += "note: " + note + "\n";
    for (const RecordedRun& run : runs)
        for (const std::string& note : run.notes()) said += "note: " + note + "\n";
    write_file(out, report_page(runs));
    if (!options.picture.empty()) write_file(options.picture, loss_picture(runs));
    return said + "wrote " + out.string() +
           (options.picture.empty() ? "" : " and " + options.picture);
}

void serve_report(const ReportOptions& options, const std::function<void(const std::string&)>& say,
                  const std::function<bool()>& stop) {
    std::vector<RecordedRun> runs = open_runs(options, most_live_rows);
    const auto updated = [&](auto make) {
        return [&runs, make] {
            for (RecordedRun& run : runs) run.update();
            return make(runs);
        };
    };
    constexpr int pixels = 600;
    PageServer server(
        options.address, options.port,
        {{"/", {"text/html", updated([](const auto& of) { return report_page(of, true); })}},
         {"/data",
          {"application/json", updated([](const auto& of) { return page_data(of, pixels); })}}});
    std::string names;
    for (const RecordedRun& run : runs) names += (names.empty() ? "" : ", ") + run.name();
    char host[256] = "HOST";
    ::gethostname(host, sizeof host - 1);
    say(concat("the page about ", names, " is at ", server.url(host), " until Ctrl-C\n",
               "from another machine: ssh -L ", server.port(), ":", server.place(), " ", host,
               ", then open http://localhost:", server.port(), "/ there",
               net::is_loopback(options.address)
                   ? ""
                   : "\nnote: whoever reaches this address can read the page"));
    server.serve(stop);
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
