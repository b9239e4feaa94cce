// How long a run's steps take: since the last report, and recently.
#pragma once
#include <cstdint>
#include <deque>

#include "parallel/step_clock.h"

namespace train_gpt {

class StepPace {
  public:
    void add(double seconds, const StepTimes& times);

    /// The mean over the steps since the last take(); there must be at least one.
    struct Mean {
        double seconds = 0;
        StepTimes times;
    };
    Mean take();

    /// The mean seconds of the last `window` steps; 0 before the first step. The first step of a
    /// process includes one-time work, so it counts only until there is a second step.
    double recent() const;

    static constexpr size_t window = 32;

  private:
    int64_t steps_ = 0, taken_ = 0;  // steps of the process; steps up to the last take()
    double seconds_ = 0;             // since the last take()
    StepTimes times_;
    std::deque<double> recent_;
};

}  // namespace train_gpt
