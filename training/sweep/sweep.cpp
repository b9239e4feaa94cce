#include "training/sweep/sweep.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <optional>
#include <set>
#include <utility>

#include <omp.h>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "base/terminal_text.h"
#include "training/config/config_keys.h"
#include "training/config/config_text.h"
#include "training/config/load_config.h"
#include "training/files/checkpoint.h"
#include "training/files/decay_start.h"
#include "training/files/run_folder.h"
#include "training/interrupt.h"
#include "training/sweep/jobs.h"
#include "training/sweep/summary.h"
#include "training/sweep/sweep_page.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

using State = SweptRun::State;

constexpr const char* given_file = "given.json";
constexpr const char* output_file = "output.txt";

/// Keys that may change when a sweep continues: what its runs learn does not depend on them.
bool may_change(const std::string& difference) {
    for (const char* key : {"description ", "run_dir ", "log.", "checkpoint.", "sampling.",
                            "schedule.max_minutes ", "parallel.timeout_seconds "})
        if (difference.starts_with(key)) return true;
    return false;
}

void warn(const std::string& text) { print_line(stderr, "train_gpt: " + printable_line(text)); }

/// The last line that a run has printed that is not empty, without the program's name.
std::string last_words(const fs::path& output) {
    std::string text(MappedFile(output).text());
    text.erase(text.find_last_not_of("\n\r ") + 1);
    text.erase(0, text.rfind('\n') + 1);
    const std::string name = "train_gpt: ";
    return text.starts_with(name) ? text.substr(name.size()) : text;
}

class Sweep {
  public:
    Sweep(const SweepPlan& plan, const std::function<void(const std::string&)>& say);
    int run();

  private:
    fs::path folder_of(size_t run) const { return plan_.folder / plan_.runs[run].name; }
    std::vector<int64_t> points_of(size_t run) const {
        return halving_points(plan_.runs[run].first_step, plan_.runs[run].steps);
    }
    void refuse_other_folders() const;
    void write_configurations() const;
    void read(size_t run);
    void train_to(const std::vector<int64_t>& stops);
    Jobs::Command command(size_t run, int64_t stop, size_t slot) const;
    void ended(const Jobs::Ended& job, int64_t stop);
    void halve(size_t point);
    double halving_loss(size_t combination, size_t point) const;
    int report();

    const SweepPlan& plan_;
    const std::function<void(const std::string&)>& say_;
    std::vector<SweptRun> runs_;
    std::set<size_t> failed_;  // in this start, and not tried again
    int threads_ = 1;          // of a run
};

Sweep::Sweep(const SweepPlan& plan, const std::function<void(const std::string&)>& say)
    : plan_(plan), say_(say) {
    for (const PlannedRun& run : plan.runs)
        runs_.push_back({.name = run.name, .combination = run.combination, .seed = run.seed});
    const auto jobs = std::min(static_cast<size_t>(plan.options.jobs), plan.runs.size());
    threads_ = std::max(1, omp_get_max_threads() / static_cast<int>(jobs));
}

/// A run's folder, whose files a sweep would be mixed with.
void Sweep::refuse_other_folders() const {
    std::error_code code;
    if (fs::exists(plan_.folder / "metrics.jsonl", code) ||
        fs::exists(plan_.folder / run_manifest, code) || !list_checkpoints(plan_.folder).empty())
        throw Error(plan_.folder.string(),
                    " is the folder of a run or a checkpoint; choose another one for the sweep "
                    "with --set run_dir=…");
}

/// Throws Error if a run has begun with another configuration.
void Sweep::write_configurations() const {
    for (size_t run = 0; run < runs_.size(); ++run) {
        const fs::path file = folder_of(run) / given_file;
        const Config& config = plan_.runs[run].config;
        if (fs::exists(file)) {
            const Config before = parse_config(std::string(MappedFile(file).text()), file.string());
            for (const std::string& change : config_differences(before, config))
                if (!may_change(change))
                    throw Error("the sweep in ", plan_.folder.string(),
                                " was begun with another configuration: ", change,
                                "; change it back, or choose another folder with --set "
                                "run_dir=…");
        }
        make_directory(folder_of(run));
        write_file(file, to_json(config));
        record_decay_start(folder_of(run), plan_.runs[run].decay_from, config);
    }
}

void Sweep::read(size_t run) {
    const RunRecord record = read_record(folder_of(run), plan_.measure, plan_.runs[run].first_step);
    SweptRun& swept = runs_[run];
    swept.step = record.step;
    swept.loss = record.loss;
    if (record.complete) swept.state = State::finished;
}

Jobs::Command Sweep::command(size_t run, int64_t stop, size_t slot) const {
    Jobs::Command command{.arguments = {"train", (folder_of(run) / given_file).string()},
                          .output = folder_of(run) / output_file,
                          .environment = {concat("OMP_NUM_THREADS=", threads_)}};
    if (stop > 0) {
        command.arguments.emplace_back("--stop-at");
        command.arguments.push_back(std::to_string(stop));
    }
    // Each job has a GPU of its own where several are named.
    if (const char* devices = std::getenv("CUDA_VISIBLE_DEVICES")) {
        std::vector<std::string> names(1);
        for (const char* c = devices; *c; ++c)
            if (*c == ',')
                names.emplace_back();
            else
                names.back() += *c;
        if (names.size() > 1)
            command.environment.push_back("CUDA_VISIBLE_DEVICES=" + names[slot % names.size()]);
    }
    return command;
}

/// Trains each run that is neither complete nor out up to its step of `stops` (0: to its end).
void Sweep::train_to(const std::vector<int64_t>& stops) {
    std::deque<size_t> waiting;
    for (size_t run = 0; run < runs_.size(); ++run) {
        if (runs_[run].state == State::halved || failed_.contains(run)) continue;
        read(run);
        const bool is_there = stops[run] > 0 && runs_[run].step >= stops[run];
        if (runs_[run].state != State::finished && !is_there) waiting.push_back(run);
    }
    Jobs jobs;
    bool signalled = false;
    while (jobs.running() > 0 || (!waiting.empty() && !interrupted())) {
        while (!waiting.empty() && !interrupted() &&
               jobs.running() < static_cast<size_t>(plan_.options.jobs)) {
            const size_t run = waiting.front();
            waiting.pop_front();
            runs_[run].state = State::waiting;
            jobs.start(run, command(run, stops[run], jobs.free_slot()));
            say_(concat(runs_[run].name, runs_[run].step > 0
                                             ? concat(": resumes after step ", runs_[run].step)
                                             : std::string(": starts")));
        }
        if (interrupted() && !std::exchange(signalled, true)) jobs.signal(interrupt_signal());
        if (const auto job = jobs.poll()) ended(*job, stops[job->job]);
    }
}

void Sweep::ended(const Jobs::Ended& job, int64_t stop) {
    SweptRun& run = runs_[job.job];
    read(job.job);
    if (job.code == 0 && run.state == State::finished)
        return say_(
            concat(run.name, ": finished, ", name_of(plan_.measure), " ", loss_text(run.loss)));
    if (job.code == 0 && stop > 0) return say_(concat(run.name, ": reached step ", run.step));
    if (job.code == stopped_early_code(false) || job.code == stopped_early_code(true) ||
        interrupted()) {
        run.state = State::stopped;
        return say_(concat(run.name, ": stopped, ",
                           run.step > 0 ? concat("saved after step ", run.step)
                                        : std::string("with nothing to save")));
    }
    run.state = State::failed;
    failed_.insert(job.job);
    const fs::path output = folder_of(job.job) / output_file;
    run.reason = job.code < 0 ? concat("a signal (", -job.code, ") ended it")
                              : concat(last_words(output), " (exit code ", job.code, ")");
    warn(concat(run.name, " failed: ", run.reason, "; see ", output.string()));
}

/// NaN if a run of the combination has failed.
double Sweep::halving_loss(size_t combination, size_t point) const {
    double sum = 0;
    int count = 0;
    for (size_t run = 0; run < runs_.size(); ++run) {
        if (runs_[run].combination != combination) continue;
        if (failed_.contains(run)) return std::nan("");
        sum +=
            training_loss_before(folder_of(run), points_of(run)[point], plan_.runs[run].first_step);
        ++count;
    }
    return sum / count;
}

/// Stops the worse half of the combinations that are left.
void Sweep::halve(size_t point) {
    std::vector<std::pair<double, size_t>> order;
    for (size_t c = 0; c < plan_.combinations.size(); ++c) {
        const bool is_out = std::ranges::any_of(runs_, [&](const SweptRun& run) {
            return run.combination == c && run.state == State::halved;
        });
        if (const double loss = halving_loss(c, point); !is_out)
            order.emplace_back(std::isfinite(loss) ? loss : HUGE_VAL, c);
    }
    std::ranges::stable_sort(order);
    if (order.empty() || order[0].first == HUGE_VAL)
        return say_("--halve stops nothing: no run has a loss yet");
    for (size_t i = (order.size() + 1) / 2; i < order.size(); ++i) {
        for (SweptRun& run : runs_)
            if (run.combination == order[i].second && run.state != State::failed &&
                run.state != State::finished)
                run.state = State::halved;
        say_(concat(
            "--halve stops ", describe(plan_.keys, plan_.combinations[order[i].second].values),
            ": training loss ", loss_text(order[i].first), ", best ", loss_text(order[0].first)));
    }
}

int Sweep::report() {
    const SweepSummary summary = summarize(plan_.measure, plan_.keys, plan_.combinations, runs_);
    const std::string json = to_text(summary_json(summary), 2) + "\n";
    write_file(plan_.folder / "sweep.json", json);
    const fs::path name = fs::absolute(plan_.folder).lexically_normal();
    write_file(plan_.folder / "report.html",
               sweep_page(summary, (name.has_filename() ? name : name.parent_path()).filename()));
    const auto count = [&](State state) {
        return std::ranges::count(runs_, state, &SweptRun::state);
    };
    const bool early = interrupted() || count(State::stopped) > 0;
    if (early)
        say_(concat(interrupted() ? concat(interrupted(), ": ") : std::string(), "stopped early; ",
                    count(State::finished), " of ", runs_.size(),
                    " runs have finished; the same command continues"));
    if (!interrupted())
        std::fputs(printable(plan_.options.json ? json : summary_text(summary)).c_str(), stdout);
    if (count(State::failed) > 0)
        warn(concat(count(State::failed), " of ", runs_.size(),
                    " runs failed; the same command tries them again"));
    say_(concat("wrote ", (plan_.folder / "report.html").string()));
    if (interrupted()) return stopped_early_code(interrupt_signal() == SIGINT);
    if (count(State::failed) > 0) return 1;
    return early ? stopped_early_code(false) : 0;
}

int Sweep::run() {
    refuse_other_folders();
    const RunFolder lock(plan_.folder);
    write_configurations();
    std::vector<int64_t> stops(runs_.size(), 0);
    // A run that has stopped early has no loss at the point yet.
    const auto may_train = [&] {
        return !interrupted() && std::ranges::count(runs_, State::stopped, &SweptRun::state) == 0;
    };
    if (plan_.options.halve)
        for (size_t point = 0; point < halving_points(0, 1).size() && may_train(); ++point) {
            for (size_t run = 0; run < runs_.size(); ++run) stops[run] = points_of(run)[point];
            train_to(stops);
            if (may_train()) halve(point);
        }
    if (may_train()) train_to(std::vector<int64_t>(runs_.size(), 0));
    return report();
}

}  // namespace

std::vector<int64_t> halving_points(int64_t first, int64_t steps) {
    const int64_t trained = steps - first;
    return {first + std::max<int64_t>(trained / 4, 1), first + std::max<int64_t>(trained / 2, 1)};
}

int run_sweep(const SweepPlan& plan, const std::function<void(const std::string&)>& say) {
    return Sweep(plan, say).run();
}

}  // namespace train_gpt
