// What a run measures in its training steps and evaluations: records, and the sinks that take them.
// The first sink is metrics.jsonl in the run's folder. Later starts of the run read from it what
// earlier starts have measured. tensorboard.h has another sink.
#pragma once
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/stopwatch.h"
#include "training/files/append_file.h"
#include "training/files/position.h"

namespace train_gpt {

/// The measurements of one step or one evaluation. docs/running.md describes the fields.
struct MetricsRecord {
    enum class Kind { training_step, evaluation };
    /// A list has a number for each layer of the model.
    using Value = std::variant<int64_t, double, std::string, std::vector<double>>;
    using Fields = std::vector<std::pair<std::string, Value>>;

    Kind kind = Kind::training_step;
    int64_t step = 0;  // how many steps were done
    Fields fields;     // in the order of a line
};

/// Takes records.
class MetricsSink {
  public:
    MetricsSink() = default;
    virtual ~MetricsSink() = default;
    MetricsSink(const MetricsSink&) = delete;
    MetricsSink& operator=(const MetricsSink&) = delete;

    /// Takes one record. A full disk does not end the run; a file that is no longer in place does.
    virtual void write(const MetricsRecord& record) = 0;
    /// Takes a text after a step, such as a sample, if the sink shows texts.
    virtual void write_text(int64_t /*step*/, const std::string& /*name*/,
                            const std::string& /*text*/) {}
};

/// metrics.jsonl (JSON Lines). Every line is one valid JSON object: the step and the fields. NaN
/// and infinities are written as null, also in lists.
class JsonLinesSink : public MetricsSink {
  public:
    /// Keeps the lines of steps <= resume_step of an earlier run in this folder. Drops the lines of
    /// later steps, since these steps are run again. Drops an incomplete last line. A run that
    /// starts from the beginning (no resume_step) moves all lines to metrics.old.jsonl, unless
    /// metrics.old.jsonl is longer.
    JsonLinesSink(const std::filesystem::path& run_dir, std::optional<int64_t> resume_step);

    /// Appends one line.
    void write(const MetricsRecord& record) override;

    /// "seconds" of the last line that was kept; 0 if no line was kept.
    double kept_seconds() const { return kept_seconds_; }

  private:
    double kept_seconds_ = 0;
    AppendFile file_;
};

/// Calls `take` with each record in a run folder's metrics.jsonl; a long run has too many of them
/// to be in memory at once. Null is NaN, also in lists.
void read_metrics(const std::filesystem::path& run_dir,
                  const std::function<void(const MetricsRecord&)>& take);

/// What metrics.jsonl says about an evaluation.
struct LoggedEvaluation {
    int64_t step = -1;  // −1: there is no evaluation
    double nats_per_token = std::nan(""), bits_per_byte = std::nan("");
};

/// The last evaluation up to a step in a run folder's metrics.jsonl.
LoggedEvaluation last_evaluation(const std::filesystem::path& run_dir, int64_t step);
/// The first evaluation with the lowest loss, up to a step. Only evaluations on as many tokens as
/// the last one count, since others had other data.
LoggedEvaluation best_evaluation(const std::filesystem::path& run_dir, int64_t step);

/// The metrics of a run: sends each record to all sinks.
class MetricsLog {
  public:
    using Value = MetricsRecord::Value;
    using Fields = MetricsRecord::Fields;

    struct Options {
        TokenCount tokens = TokenCount(1);
        bool writes = true;  // only one of several ranks writes
    };
    /// resume_step: see JsonLinesSink.
    MetricsLog(const std::filesystem::path& run_dir, std::optional<int64_t> resume_step,
               const Options& options);

    /// The records that follow go to this sink too.
    void add(std::unique_ptr<MetricsSink> sink) { sinks_.push_back(std::move(sink)); }

    /// Writes a record of the fields and, after them,
    ///
    ///   "tokens"    the tokens of all steps up to this step
    ///   "seconds"   the seconds of training: the time since this object was made, and "seconds" of
    ///               the last line that metrics.jsonl kept
    void write(int64_t step, const Fields& fields,
               MetricsRecord::Kind kind = MetricsRecord::Kind::training_step);
    void write_text(int64_t step, const std::string& name, const std::string& text);

  private:
    std::vector<std::unique_ptr<MetricsSink>> sinks_;
    TokenCount tokens_;
    Stopwatch since_start_;
    double seconds_before_ = 0;
};

}  // namespace train_gpt
