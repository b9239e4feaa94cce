// `--profile STEPS`: where the time of a run's steps goes.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>

#include "device/profile.h"

namespace train_gpt {

class StepProfile {
  public:
    /// Measures the limits that the table is printed beside: peak_flops is measure_peak_flops'. steps = 0: no profile.
    StepProfile(const Device& device, int64_t steps, double peak_flops);

    /// 0: there will be no profile.
    int64_t steps_needed() const { return steps_ > 0 ? warm_up + steps_ : 0; }
    /// Before the first steps are submitted: the first two warm up.
    bool starts_before(int64_t step_of_process) const {
        return steps_ > 0 && step_of_process == warm_up;
    }
    bool ends_behind(int64_t steps_of_process) const {
        return steps_ > 0 && steps_of_process == steps_needed();
    }
    /// The device has nothing left to do at these calls. What is between pause() and go_on() belongs to no step; without
    /// a profile under way they do nothing.
    void start(Stream& stream);
    void pause(Stream& stream);
    void go_on(Stream& stream);
    /// Time per kind of kernel and step, its share, GB/s or TFLOP/s, whichever is nearer to its limit, and how near.
    std::string finish(Stream& stream);

  private:
    static constexpr int64_t warm_up = 2;

    int64_t steps_;
    double peak_flops_, bandwidth_ = 0;
    Profiler profiler_;
    double seconds_ = 0;  // up to start_
    bool paused_ = false;
    std::chrono::steady_clock::time_point start_;
};

/// The table by itself: totals over `steps` steps that took `seconds` together.
std::string profile_table(const std::vector<Profiler::Total>& totals, int64_t steps, double seconds,
                          double peak_flops, double bandwidth);

}  // namespace train_gpt
