// `--profile STEPS`: where the time of a run's steps goes.
#pragma once
#include <cstdint>
#include <string>

#include "base/stopwatch.h"
#include "device/profile.h"
#include "parallel/mesh.h"
#include "training/watch/measured_steps.h"

namespace train_gpt {

class StepProfile {
  public:
    /// Measures the memory bandwidth, which is one of the two limits in the table. The other limit
    /// is peak_flops, from measure_peak_flops(). steps = 0: no profile.
    StepProfile(const Device& device, int64_t steps, double peak_flops);

    const MeasuredSteps& steps() const { return steps_; }
    /// Whether the profile starts with this step, before which the device must be idle.
    bool starts_before(int64_t step_of_process) const {
        return submitted_ == 0 && steps_.start_after(step_of_process);
    }
    /// Before each step is submitted, also before one that is computed again.
    void begin_step(Stream& stream, int64_t step_of_process);
    /// The device must be idle at these calls. Time between pause() and resume() belongs to no
    /// step. pause() and resume() do nothing while no profile is active.
    void pause(Stream& stream);
    void resume(Stream& stream);
    /// Ends the profile and returns its table. Each line has a kind of kernel, with its calls and
    /// its time in a step, the time's share, the rate, and the rate's share of the limit. The rate
    /// is in GB/s or TFLOP/s, whichever is nearer to its limit.
    std::string finish(Stream& stream);

  private:
    void start(Stream& stream);

    MeasuredSteps steps_;
    int64_t submitted_ = 0;  // since the start
    double peak_flops_, bandwidth_ = 0;
    Profiler profiler_;
    double seconds_ = 0;  // before since_start_
    bool paused_ = false;
    Stopwatch since_start_;
};

/// All ranks call it with their tables. In a pipeline, returns the tables of the first rank of each
/// pipeline place, with headings. Without a pipeline, returns this rank's table.
std::string profile_of_stages(const Mesh& mesh, const std::string& table);

/// The table for given totals over `steps` steps and `repeats` more of them, which were computed
/// again. All together took `seconds`.
std::string profile_table(const std::vector<Profiler::Total>& totals, int64_t steps,
                          int64_t repeats, double seconds, double peak_flops, double bandwidth);

}  // namespace train_gpt
