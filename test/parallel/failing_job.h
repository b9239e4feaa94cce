// Jobs of the real program on several ranks in which something goes wrong, and checks of how they
// end.
#pragma once
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>
#include <sys/types.h>

#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/sorted_json.h"
#include "test/text.h"

namespace train_gpt::failing_job {

namespace fs = std::filesystem;

using Clock = std::chrono::steady_clock;
using Arguments = std::vector<std::string>;

// parallel.timeout_seconds: longer than a busy machine keeps a rank from running, which would count
// as hung; only a job with a rank that hangs takes so long.
#ifdef __SANITIZE_ADDRESS__
constexpr double timeout = 60, grace = 120;
#else
constexpr double timeout = 10;
constexpr double grace = 30;  // more time to end, however busy the machine
#endif

const Environment surroundings{
    {"OMP_NUM_THREADS", "1"},
    {"ASAN_OPTIONS", "detect_leaks=0"},  // MPI's library leaves memory behind
    {"TRAIN_GPT_SECRET", test_secret}};

Arguments operator+(Arguments a, const Arguments& b);

double seconds_since(Clock::time_point start);

std::string binary();

/// A tiny model that trains forever, with a checkpoint every fourth step.
Arguments train(const fs::path& run, const Arguments& more = {});

/// The same, with additional arguments for one rank.
Arguments train_with_one_different(const fs::path& run, int rank, const Arguments& its_arguments);

// ---- Jobs ---------------------------------------------------------------------------------------

/// A process of a job, found by the run folder that its command line names.
struct Process {
    pid_t pid;
    int rank;  // −1: the launcher
};

/// A file in /proc; empty if its process ends while it is read.
std::string read_of_process(const fs::path& file);

std::vector<Process> processes_of(const fs::path& run);

/// The last step in the run's metrics.
int64_t last_step(const fs::path& run);

class FailingJob {
  public:
    FailingJob(int ranks, const fs::path& run, const Arguments& more = {},
               const Environment& environment = {}, Launcher launcher = usual_launcher());
    FailingJob(fs::path run, const Arguments& command, Environment environment = {});
    ~FailingJob();

    /// Waits until the condition holds; false when the job ended without it.
    bool wait_until(const std::function<bool()>& condition);
    /// … and until the ranks have told each other, as they do every second, that they train.
    bool wait_for_step(int64_t step);
    /// Waits until the run has a complete checkpoint; false when the job ended without one.
    bool wait_for_checkpoint();

    /// Signals a rank, or the launcher (−1). False when there is no such process.
    bool signal(int rank, int number);
    /// Starts the clock; signal() also does.
    void mark() { event_ = Clock::now(); }
    double seconds_since_mark() const { return seconds_since(event_); }

    ProgramResult finish();

  private:
    TemporaryDirectory scratch_;
    fs::path run_;
    Clock::time_point event_ = Clock::now();
    std::future<ProgramResult> result_;
};

size_t count(const std::string& text, const std::string& part);

/// Checks that no process of a job (or of one kind) is left; gives those that are ending time.
void check_gone(
    const fs::path& run,
    const std::function<bool(const Process&)>& counts = [](const Process&) { return true; });

/// Checks that the job ended by itself within the timeout, with an error and a line that the
/// expression matches, and that none of its processes is left.
void check_failed(FailingJob& job, const fs::path& run, const std::string& expression);

const std::string last_words =
    "[^\n]*; its last collective was [a-z -]+ number [0-9]+, in step [0-9]+ \\([a-z]+\\)";

/// An expression for a rank as lines name it. `place`: its place in a mesh of several axes.
std::string named(int rank, const std::string& place = "");

/// Checks that the job whose rank is stopped (SIGSTOP) ends with a line that says so. mpirun ends
/// the stopped process as well; where nothing else started the ranks, only the test does, after the
/// others have ended by themselves.
void check_hung(FailingJob& job, const fs::path& run, int rank, Launcher launcher,
                const std::string& place = "");

/// Without the ranks' lines about a signal, which may come in the middle of another rank's line,
/// wherever mpirun has cut its output.
std::string without_signal_notes(std::string output);

/// Checks that the job stopped early after a checkpoint with the right exit code, and says why and
/// how to resume.
void check_saved(FailingJob& job, const fs::path& run, const std::string& reason, int code = 75);

/// The job of a command that succeeds by itself.
std::string check_succeeds(const Arguments& command);

/// The step of the newest checkpoint. Checks that all checkpoints of the run are whole.
int64_t newest_whole_checkpoint(const fs::path& run);

/// Checks that the same command resumes from the newest checkpoint and ends with the same result as
/// an undisturbed run.
void check_resumes(int ranks, const fs::path& run);

}  // namespace train_gpt::failing_job
