// What a person sees while a run trains: a line a step, or on a terminal one line that is rewritten.
#pragma once
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "parallel/step_clock.h"

namespace train_gpt {

/// What a line says of the steps since the line before.
struct StepReport {
    int64_t step = 0, steps = 0;                         // steps done, of
    double loss = 0;                                     // of the last of them, nats per token
    double grad_norm = 0, learning_rate = 0;             // of the last of them
    double seconds = 0;                                  // of a step: their mean
    double tokens_per_second = 0, flops_per_second = 0;  // their mean
    double peak_flops_per_second = 0;                    // measured on this machine
    uint64_t memory = 0;                                 // bytes, planned
    int ranks = 1;
    StepTimes times;          // of a step on this rank: their mean
    double seconds_left = 0;  // for the steps to come, at the speed of recent ones
};

/// A part of a progress line.
struct ProgressField {
    std::string text;
    int rank = 0;  // the higher, the sooner it is left out
};

/// Columns that a line on stdout may fill: one less than the terminal has, since some break a full
/// line; 0 where it is no terminal, or does not say.
int columns_of_stdout();

/// The fields that fit into a line of `columns` (0: any length), joined by " | ". Those of the highest rank are left out first;
/// where one field remains and is too long, it is cut.
std::string fit_fields(std::vector<ProgressField> fields, int columns);

class Progress {
  public:
    /// style: "auto" (a rewritten line when stdout is a terminal, else lines), "line" or "lines". Of several ranks only one
    /// speaks.
    explicit Progress(const std::string& style, bool speaks = true);
    ~Progress() { end_line(); }
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    /// A line with all fields, or in the line that is rewritten those that fit into the terminal's width of this moment.
    void report(const StepReport& report);
    /// In the line that is rewritten, beside what report() showed: how far work is that takes long, such as
    /// "evaluation: 35%, 0:40 left". It goes with the next report() or say(). Otherwise nothing.
    void show(const std::string& done, double seconds_left);
    /// The same within a step that takes long: how many of its micro-batches are done, after `seconds`. `expected`: seconds of
    /// the step, as far as one knew before it.
    void show_step(int64_t step, int done, int all, double seconds, double expected);
    /// Prints a line of its own, after the progress line.
    void say(const std::string& line);
    /// The same on stderr, as a warning.
    void warn(const std::string& line);

  private:
    void draw() const;
    void end_line();

    bool rewrite_, speaks_;
    bool line_open_ = false;
    std::vector<ProgressField> fields_;  // of the last report
    std::string note_;                   // of show()
    std::chrono::steady_clock::time_point shown_{};
};

/// A step that takes longer is announced, and shown by its micro-batches.
constexpr double slow_step_seconds = 10;

/// How long steps of so many FLOPs take at least, and all those to come: for before the first one.
std::string describe_slow_steps(double flops, double seconds, int64_t steps);

/// "1:02:03" or "2:03"
std::string format_duration(double seconds);

/// For times that are estimated: "12 s", "52 min", "7.5 h", "690 days", each from two of its units on.
std::string rough_duration(double seconds);

}  // namespace train_gpt
