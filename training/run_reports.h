// Everything that shows and records what a run does.
#pragma once
#include <string>

#include "training/report/report.h"
#include "training/run_start.h"
#include "training/watch/collapse_watch.h"
#include "training/watch/fingerprint_log.h"
#include "training/watch/metrics.h"
#include "training/watch/progress.h"
#include "training/watch/router_log.h"
#include "training/watch/run_history.h"
#include "training/watch/step_log.h"

namespace train_gpt {

/// What a run should know about kernels.deterministic=off; empty if that is on.
std::string note_on_bits(bool deterministic, const AttentionUse& attention);

/// Prints what is about to be trained, and what to know about it.
void announce(const RunStart& start, Progress& progress);

struct RunReports {
    /// Opens the files in the run's folder, and records the start there. All ranks call it; the
    /// first one writes. `start` and `progress` must live longer.
    RunReports(const RunStart& start, Progress& progress);

    /// Records a finished step, as StepLog::add() does, and warns if experts have collapsed.
    void add(int64_t number, const StepOutcome& outcome, StepClock& clock);
    /// Warns of a spike, and records it.
    void spike(int64_t number, const std::string& text);

    Progress& progress;
    MetricsLog metrics;  // metrics.jsonl and, if it is wanted, TensorBoard's events
    StepLog log;
    FingerprintLog fingerprints;
    RouterLog routers;
    CollapseWatch collapses;
    RunHistory history;
    LiveReport page;
};

/// Samples of a run, by the numbers that their random streams have: first, first + 1, ….
struct SampleNumbers {
    uint64_t first = 0;
    int count = 1;
};
/// Computes samples of the weights after a step; prints and records them. If no rank holds all
/// weights, all ranks call it, else one.
void print_samples(const RunStart& start, RunReports& reports, int64_t step,
                   const SampleNumbers& numbers);

}  // namespace train_gpt
