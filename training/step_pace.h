// How long a run's steps take: since the last line that said so, and lately.
#pragma once
#include <cstdint>
#include <deque>

#include "parallel/step_clock.h"

namespace train_gpt {

class StepPace {
  public:
    void add(double seconds, const StepTimes& times);

    /// The mean of the steps since the last call, of which there must be one.
    struct Mean {
        double seconds = 0;
        StepTimes times;
    };
    Mean take();

    /// The mean of the last `window` steps; the first one of a process, which pays for what is made once, counts only while it
    /// is alone. 0 before it.
    double recent() const;

    static constexpr size_t window = 32;

  private:
    int64_t steps_ = 0, taken_ = 0;  // of the process; up to the last take()
    double seconds_ = 0;             // since then
    StepTimes times_;
    std::deque<double> recent_;
};

}  // namespace train_gpt
