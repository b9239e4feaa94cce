// What a person sees while a run trains: one line a step, or on a terminal one line that is rewritten.
#pragma once
#include <cstdint>
#include <string>

#include "parallel/step_clock.h"

namespace train_gpt {

/// What a line says about one step.
struct StepReport {
    int64_t step = 0, steps = 0;  // steps done, of
    double loss = 0;              // nats per token
    double grad_norm = 0, learning_rate = 0;
    double seconds = 0;  // of this step
    double tokens_per_second = 0, flops_per_second = 0;
    double peak_flops_per_second = 0;  // measured on this machine
    uint64_t memory = 0;               // bytes, planned
    int ranks = 1;
    StepTimes times;  // of this rank
};

class Progress {
  public:
    /// style: "auto" (a rewritten line when stdout is a terminal, else lines), "line" or "lines". Of several ranks only one
    /// speaks.
    explicit Progress(const std::string& style, bool speaks = true);
    ~Progress() { end_line(); }
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;
    void report(const StepReport& report);
    /// Prints a line of its own, behind the progress line.
    void say(const std::string& line);
    /// The same on stderr, as a warning.
    void warn(const std::string& line);

  private:
    void end_line();

    bool rewrite_, speaks_;
    bool line_open_ = false;
    double smoothed_seconds_ = 0;
};

/// "1:02:03" or "2:03"
std::string format_duration(double seconds);

}  // namespace train_gpt
