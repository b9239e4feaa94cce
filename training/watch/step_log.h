// What is shown and logged about a run's steps: lines in the terminal and in metrics.jsonl, and
// where the time of the steps went.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "base/stopwatch.h"
#include "training/run_start.h"
#include "training/watch/metrics.h"
#include "training/watch/progress.h"
#include "training/watch/slow_ranks.h"
#include "training/watch/step_accounting.h"
#include "training/watch/step_pace.h"

namespace train_gpt {

/// The work of the largest step, over all ranks.
struct StepSize {
    int64_t targets = 0;  // tokens that are predicted
    double flops = 0;
    int ranks = 1;
    double peak_flops = 0;       // per second, as measured on this rank's device
    double datasheet_flops = 0;  // per second, by its datasheet; 0 if unknown

    double least_seconds() const { return flops / (peak_flops * ranks); }
};
StepSize size_of_step(const RunStart& start);

class StepLog {
  public:
    /// All that is passed by reference must outlive the object.
    StepLog(const RunStart& start, Progress& progress, MetricsLog& metrics);

    /// Records a finished step; `number` counts from 1. Takes the step's times from the clock. All
    /// ranks call it, with the same steps.
    void add(int64_t number, const StepOutcome& outcome, StepClock& clock);
    /// Sets how many bytes this rank has sent in the step, by group of ranks.
    void sent(std::map<std::string, int64_t> bytes) { sent_ = std::move(bytes); }
    /// A step's exact sums have overflowed, and it is computed again. `lost`: the times of what was
    /// in vain, which count for the step.
    void repeat(int64_t number, const StepTimes& lost);
    /// Says that the time up to now belongs to no step.
    void restart_time() { since_last_step_.restart(); }

    const StepSize& size() const { return size_; }
    /// Seconds of a step: of recent ones, or before the first one a lower bound.
    double expected_seconds() const;
    /// StepAccounting::summary(), which all ranks call.
    std::string summary(const World& world) const { return accounting_.summary(world); }

  private:
    StepReport report_of(int64_t number, const StepOutcome& outcome);
    void write(const StepReport& report, const StepOutcome& outcome);
    MetricsLog::Fields fields_of_data(int64_t number, const StepSums& sums) const;

    const RunStart& start_;
    StepSize size_;
    Progress& progress_;
    MetricsLog& metrics_;
    StepAccounting accounting_;
    StepPace pace_;
    SlowWorkWatch slow_ranks_;
    double peak_flops_;  // the highest so far
    Stopwatch since_last_step_;
    std::map<std::string, int64_t> sent_;
    int64_t repeated_ = 0;  // steps since the last line of metrics.jsonl
    bool has_repeated_ = false;
    StepTimes lost_;  // before the next step
};

}  // namespace train_gpt
