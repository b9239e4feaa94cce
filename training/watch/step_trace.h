// `--trace STEPS`: when each rank did what in a few steps, as a timeline for Perfetto or Chrome's
// trace viewer (Trace Event Format).
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "device/trace.h"
#include "parallel/world.h"
#include "training/watch/measured_steps.h"
#include "training/watch/progress.h"

namespace train_gpt {

/// All ranks call the functions that take a World in the same order.
class StepTrace {
  public:
    /// steps = 0: no trace.
    StepTrace(const Device& device, int64_t steps, std::filesystem::path run_dir)
        : steps_(steps), run_dir_(std::move(run_dir)), tracer_(device) {}

    const MeasuredSteps& steps() const { return steps_; }
    /// Whether to call start() before this step is submitted. The last step of the warm-up counts
    /// the spans, so that start() can make room for them.
    bool starts_before(int64_t step_of_process) const {
        return state_ != State::tracing && steps_.start_after(step_of_process);
    }
    /// Begins the trace. The device must be idle. `step`: the first step to trace, counted from 1.
    void start(Stream& stream, int64_t step, const World& world);
    /// begin_step() is called before each step, and end_step() after the step was submitted. Steps
    /// count from 1.
    void begin_step(Stream& stream, int64_t step, int64_t step_of_process);
    void end_step() { step_span_.reset(); }
    /// Called between steps, when the device is idle. What happens until resume() is one span.
    void pause();
    void resume(Stream& stream);
    /// Writes the trace if start() was called, even if fewer steps than planned were traced. Each
    /// of several ranks writes trace/step-NNNNNNNN-rank-NNNNN.json. The first rank writes all of
    /// these together into trace/step-NNNNNNNN.json. Prints where the trace is, or a warning if it
    /// could not be written.
    void finish(const World& world, Progress& progress);

  private:
    enum class State : uint8_t { off, counting, tracing };

    /// The file of a rank's trace; without `rank`, the file of all ranks' traces together.
    std::filesystem::path file(std::optional<int> rank = {}) const;
    void write_rank(const World& world) const;
    void merge(int ranks) const;

    MeasuredSteps steps_;
    std::filesystem::path run_dir_;
    Tracer tracer_;
    std::optional<TraceSpan> step_span_, pause_span_;
    State state_ = State::off;
    int64_t first_step_ = 0, traced_ = 0;
    double start_ = 0;  // when the first rank started, on this host's clock monotonic_seconds()
};

}  // namespace train_gpt
