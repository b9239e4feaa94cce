// The progress shown while a run trains: one line per step, or on a terminal a single line that is
// rewritten.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/stopwatch.h"
#include "parallel/step_clock.h"
#include "training/config/config.h"

namespace train_gpt {

/// What a line says about the steps since the previous line.
struct StepReport {
    int64_t step = 0, steps = 0;                         // steps done; steps of the whole run
    double loss = 0;                                     // of the last step, nats per token
    double grad_norm = 0, learning_rate = 0;             // of the last step
    double seconds = 0;                                  // of a step, mean
    double tokens_per_second = 0, flops_per_second = 0;  // means
    double peak_flops_per_second = 0;                    // measured on these devices
    double datasheet_flops_per_second = 0;               // of these devices; 0 if unknown
    uint64_t memory = 0;                                 // bytes, planned
    int ranks = 1;
    StepTimes times;          // of a step on this rank, mean
    double seconds_left = 0;  // for the remaining steps, at the recent speed
};

/// A part of a progress line.
struct ProgressField {
    std::string text;
    int rank = 0;            // the higher, the sooner it is left out
    std::string brief = {};  // a shorter text for narrow terminals; empty: none
};
/// Fields of a higher rank are left out before the others are shortened. The others are the loss,
/// tokens per second, the share of the limit, memory and the ETA.
constexpr int last_essential_rank = 5;

/// The parts of a step's line.
std::vector<ProgressField> fields_of(const StepReport& report);

/// The fields that fit into a line of `columns` (0: any length), joined by " | ". Fields of the
/// highest rank are left out first. When only essential fields remain, they are shortened before
/// more fields are left out. A single field that is still too long is cut.
std::string fit_fields(std::vector<ProgressField> fields, int columns);

class Progress {
  public:
    /// speaks: whether this rank prints; only one of several ranks does. quiet: only warnings are
    /// printed. line_seconds: see show().
    explicit Progress(ProgressStyle style, bool speaks = true, bool quiet = false,
                      double line_seconds = 60);
    ~Progress() { end_line(); }
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    /// Prints a line with all fields. A line that is rewritten shows the fields that fit into the
    /// terminal's current width.
    void report(const StepReport& report);
    /// Shows how far a long piece of work is: "evaluation: 35%, 0:40 left". A line that is
    /// rewritten gets this text after what report() has shown, until the next report() or say(). If
    /// lines are not rewritten, this text gets a line of its own, if line_seconds have passed since
    /// the last one.
    void show(const std::string& done, double seconds_left);
    /// Within a step that takes long, shows which micro-batch comes next, as show() does. `done` of
    /// `all` micro-batches took `seconds`. `expected`: the seconds of the whole step, as estimated
    /// before the step.
    void show_step(int64_t step, int done, int all, double seconds, double expected);
    /// Prints a separate line after the progress line.
    void say(const std::string& line);
    /// Prints text that is not a message, such as a sample: its lines are not broken.
    void show_text(const std::string& text);
    /// Prints a separate line on stderr, as a warning.
    void warn(const std::string& line);

  private:
    void draw() const;
    void end_line();

    bool rewrite_, speaks_, warns_;
    double line_seconds_;
    bool line_open_ = false;
    std::vector<ProgressField> fields_;  // of the last report()
    std::string note_;                   // of the last show()
    Stopwatch since_shown_;
};

/// A step that takes longer than this is slow: it is announced, and its micro-batches are shown as
/// they are done.
constexpr double slow_step_seconds = 10;

/// Says how long a step of `flops` takes at least, and how long all `steps` remaining steps take.
/// The text is printed before the first step.
std::string describe_slow_steps(double flops, double seconds, int64_t steps);

/// "1:02:03" or "2:03"
std::string format_duration(double seconds);

/// An estimated time: "12 s", "52 min", "7.5 h", "690 days". A unit is used if the value in it is
/// at least 2.
std::string rough_duration(double seconds);

}  // namespace train_gpt
