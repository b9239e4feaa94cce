// A run's folder: one run at a time writes into it, and it tells afterwards what the run was.
//
//   config.json        the resolved configuration
//   manifest.json      version, host, seed, data files with sizes, and with the hashes that `tokenize` or shard_watch.h recorded
//   verified.json      the data files that were verified: shard_watch.h
//   choices.json       what the run picked by itself: choices.h
//   metrics.jsonl      one JSON object a line: training steps, evaluations
//   metrics.old.jsonl  the longest that a new run found in its place, without a checkpoint to go on from
//   step-NNNNNNNN/     checkpoints
//   lock               held while a run is going on
#pragma once
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "parallel/world.h"
#include "training/config.h"

namespace train_gpt {

class RunFolder {
  public:
    /// Makes the folder where it does not exist and locks it. Throws Error when another run holds it, and for a folder that
    /// has files of these names which no run wrote, such as a checkpoint. Of several ranks the first does so, and all find
    /// out whether they see the same folder.
    explicit RunFolder(const std::filesystem::path& path, const World& world = {});
    ~RunFolder();
    RunFolder(const RunFolder&) = delete;
    RunFolder& operator=(const RunFolder&) = delete;

    const std::filesystem::path& path() const { return path_; }
    /// Writes config.json and manifest.json. Returns which data ("data.train", "data.val") had other contents or weights in
    /// the manifest that was there.
    std::vector<std::string> describe(const Config& config) const;

    /// The hashes in manifest.json, by path, of data that no data.json speaks of: what an earlier start of the run read.
    std::map<std::string, std::string> recorded_hashes() const;
    /// Adds hashes to the entries of these paths there.
    void record_hashes(const std::map<std::string, std::string>& hashes) const;

  private:
    void lock();

    std::filesystem::path path_;
    int lock_ = -1;
};

/// What a run's metrics tell of an evaluation.
struct LoggedEvaluation {
    int64_t step = -1;  // none
    double nats_per_token = std::nan(""), bits_per_byte = std::nan("");
};

/// The last evaluation up to a step in a run folder's metrics.jsonl, where there is one.
LoggedEvaluation last_evaluation(const std::filesystem::path& run_dir, int64_t step);

/// metrics.jsonl. Every line is one valid JSON object; NaN and infinities are written as null. docs/running.md says what the
/// fields are.
class MetricsLog {
  public:
    using Value = std::variant<int64_t, double, std::string>;
    using Fields = std::vector<std::pair<std::string, Value>>;

    struct Options {
        int64_t tokens_per_step = 1;
        bool writes = true;  // of several ranks only one
    };
    /// Keeps the lines of steps <= resume_step of an earlier run in this folder, and drops the rest: those steps
    /// come again. A half-written last line is dropped. A run that begins anew, with nothing as resume_step, leaves all of
    /// them in metrics.old.jsonl, unless what is there is longer.
    MetricsLog(const std::filesystem::path& run_dir, std::optional<int64_t> resume_step,
               const Options& options);
    ~MetricsLog();
    MetricsLog(const MetricsLog&) = delete;
    MetricsLog& operator=(const MetricsLog&) = delete;

    /// Appends one line: the step, the fields, "tokens" (of all steps up to this one) and "seconds" (of training: since this
    /// object was made, and before that those of the last line that was kept). A disk that is full does not end the run: it is
    /// said once on stderr, and lines are missing until there is room again.
    void write(int64_t step, const Fields& fields);

  private:
    std::filesystem::path path_;
    int64_t tokens_per_step_;
    int file_ = -1;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
    double seconds_before_ = 0;
    bool failed_ = false;
};

}  // namespace train_gpt
