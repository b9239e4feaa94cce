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
#include "training/watch/progress.h"

namespace train_gpt {

/// All ranks call the functions that take a World in the same order.
class StepTrace {
  public:
    /// steps = 0: no trace.
    StepTrace(const Device& device, int64_t steps, std::filesystem::path run_dir)
        : steps_(steps), run_dir_(std::move(run_dir)), tracer_(device) {}

    /// Steps that the process must run for the trace; 0: no trace.
    int64_t steps_needed() const { return steps_ > 0 ? warm_up + steps_ : 0; }
    /// Whether start() comes before this step is submitted. The first two steps are warm-up; the
    /// second of them counts the spans, for which start() then makes room.
    bool starts_before(int64_t step_of_process) const {
        return steps_ > 0 && step_of_process == warm_up;
    }
    bool ends_after(int64_t steps_of_process) const {
        return steps_ > 0 && steps_of_process == steps_needed();
    }
    /// The device must be idle. `step`: the first one to trace, counted from 1.
    void start(Stream& stream, int64_t step, const World& world);
    /// Before each step, and after it was submitted. Steps count from 1.
    void begin_step(Stream& stream, int64_t step, int64_t step_of_process);
    void end_step() { step_span_.reset(); }
    /// Between steps, where the device is idle. What happens until go_on() is one span.
    void pause();
    void go_on(Stream& stream);
    /// Writes the trace if start() was called, also after fewer steps: each of several ranks
    /// trace/step-NNNNNNNN-rank-NNNNN.json, the first one all of them together in
    /// trace/step-NNNNNNNN.json. Says where it is, or warns that it could not be written.
    void finish(const World& world, Progress& progress);

  private:
    static constexpr int64_t warm_up = 2;

    enum class State : uint8_t { off, counting, tracing };

    /// Of one rank, or of all together.
    std::filesystem::path file(std::optional<int> rank = {}) const;
    void write_rank(const World& world) const;
    void merge(int ranks) const;

    int64_t steps_;
    std::filesystem::path run_dir_;
    Tracer tracer_;
    std::optional<TraceSpan> step_span_, pause_span_;
    State state_ = State::off;
    int64_t first_step_ = 0, traced_ = 0;
    double start_ = 0;  // the first rank's start, on this host's clock of monotonic_seconds()
};

}  // namespace train_gpt
