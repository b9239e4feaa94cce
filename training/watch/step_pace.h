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

    /// The mean of the last `window` steps. The first step of a process, which includes one-time
    /// work, counts only until there is a second. 0 before the first.
    double recent() const;

    static constexpr size_t window = 32;

  private:
    int64_t steps_ = 0, taken_ = 0;  // of the process; up to the last take()
    double seconds_ = 0;             // since then
    StepTimes times_;
    std::deque<double> recent_;
};

}  // namespace train_gpt
