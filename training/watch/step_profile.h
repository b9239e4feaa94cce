// `--profile STEPS`: where the time of a run's steps goes.
#pragma once
#include <cstdint>
#include <string>

#include "base/stopwatch.h"
#include "device/profile.h"
#include "parallel/mesh.h"

namespace train_gpt {

class StepProfile {
  public:
    /// Measures the memory bandwidth, which is one of the two limits in the table. The other limit
    /// is peak_flops, from measure_peak_flops(). steps = 0: no profile.
    StepProfile(const Device& device, int64_t steps, double peak_flops);

    /// Steps that the process must run for the profile; 0: no profile.
    int64_t steps_needed() const { return steps_ > 0 ? warm_up + steps_ : 0; }
    /// Whether the profile starts with this step, before which the device must be idle. The first
    /// two steps are warm-up.
    bool starts_before(int64_t step_of_process) const {
        return steps_ > 0 && submitted_ == 0 && step_of_process == warm_up;
    }
    bool ends_after(int64_t steps_of_process) const {
        return steps_ > 0 && steps_of_process == steps_needed();
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
    static constexpr int64_t warm_up = 2;

    void start(Stream& stream);

    int64_t steps_, submitted_ = 0;  // submitted since the start
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
