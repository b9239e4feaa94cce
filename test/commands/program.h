// The program as a process: started with arguments and surroundings, watched, and judged by its
// exit code, its output and what it left behind. TRAIN_GPT_BINARY (or TRAIN_GPT, set by the
// Makefile) names it; the default is build/train_gpt.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <sys/types.h>

#include "test/catch.h"
#include "test/file_difference.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/sorted_json.h"
#include "test/text.h"

// Its own namespace, so that its classes are not confused with the program's classes of the same
// names.
namespace train_gpt::inline program {

using Arguments = std::vector<std::string>;
namespace fs = std::filesystem;

std::string binary();

/// What a process starts with besides its arguments.
struct Surroundings {
    Arguments environment = {};  // "NAME=value"
    /// The largest file that it may write; longer writes fail as on a full disk.
    rlim_t file_bytes = RLIM_INFINITY;
    bool bound_by_permissions = false;  // also when the tests run as root
    std::string program = binary();
};

struct Outcome {
    int code = 0;  // exit code, or minus the signal that ended it
    std::string out, err;
};

class Process {
  public:
    explicit Process(const Arguments& arguments, const Surroundings& surroundings = {});
    ~Process();  // kills it
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;

    pid_t pid() const { return pid_; }
    std::string out() const { return read(out_path()); }
    /// stderr without the note that there is no GPU.
    std::string err() const;
    void signal(int number);

    /// Waits until the condition holds; false if the process ended without it, or after two
    /// minutes.
    bool wait_until(const std::function<bool()>& condition);
    bool wait_for_step(int64_t step);
    Outcome finish();

  private:
    std::string out_path() const { return output_ / "out"; }
    std::string err_path() const { return output_ / "err"; }

    TemporaryDirectory output_;
    pid_t pid_ = -1;
    int status_ = 0;
    bool over_ = false;
};

Outcome train_gpt_with(const Arguments& arguments, const Surroundings& surroundings = {});

/// Checks a failure: the exit code, a single line on stderr, and what that line names.
void check_refused(const Outcome& outcome, int code, const Arguments& parts);
Outcome check_succeeds(const Outcome& outcome);
/// Checks that a command stopped early with everything saved, by default not by Ctrl-C.
Outcome check_stopped(const Outcome& outcome, int code = 75);

/// A text of a few invented words, tokenized, and a configuration that trains a tiny model on it.
/// Made once.
class Workplace {
  public:
    static const Workplace& get();

    std::string data(const std::string& name) const { return directory_ / ("data/" + name); }
    std::string text() const { return directory_ / "text.txt"; }
    std::string config() const { return directory_ / "config.json"; }
    Arguments train(const std::string& run_dir, const Arguments& more = {}) const;

  private:
    Workplace();

    TemporaryDirectory directory_;
};

std::string step_folder(int64_t step);

/// The names of a folder's entries.
std::set<std::string> names_in(const fs::path& folder);

/// The steps of a run's checkpoints; a name that only begins like a checkpoint's is a failure.
std::vector<int64_t> checkpoints_in(const fs::path& run_dir);

/// metrics.jsonl without the values that depend on the clock. Every line must be a JSON object, and
/// the lines of each kind must have increasing steps.
std::vector<SortedJson> metrics_of(const fs::path& run_dir);

inline const char* const optimizer_file = "optimizer-00000-of-00001.safetensors";

/// Checks that two runs have the same weights, optimizer state and metrics at a step, bit for bit.
void check_same_state(const fs::path& a, const fs::path& b, int64_t step);
void check_finite_weights(const fs::path& checkpoint);
/// Replaces a file of a checkpoint as if the run had written it: the manifest gets its new hash.
void replace_in_checkpoint(const fs::path& checkpoint, const std::string& name,
                           const std::string& bytes);

/// A finished run of the workplace's configuration, made once, with checkpoints of steps 4, 8 and
/// 12.
const std::string& finished_run();

/// The number after `label` in a text.
double number_after(const std::string& text, const std::string& label);

Arguments operator+(Arguments a, const Arguments& b);

/// A run that does not end by itself.
inline const Arguments endless{"--set", "schedule.steps=1000000"};

/// A run whose steps take about a second each.
inline const Arguments slow{"--set", "model.n_layer=4",
                            "--set", "model.n_embd=256",
                            "--set", "model.n_head=4",
                            "--set", "model.n_ctx=128",
                            "--set", "batch.sequence_length=128",
                            "--set", "batch.micro_batch=32",
                            "--set", "batch.tokens_per_step=4096"};

}  // namespace train_gpt::inline program
