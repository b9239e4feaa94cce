// Where the time of a run's steps went, on each rank.
#pragma once
#include <cstdint>
#include <string>

#include "parallel/step_clock.h"
#include "parallel/world.h"

namespace train_gpt {

class StepAccounting {
  public:
    /// The first steps of a process are warm-up and do not count.
    void add(const StepTimes& times);

    /// All ranks call it. Returns each phase's share of the mean step over all ranks. If there are
    /// several groups of ranks, returns the share of communication for each group, too. With
    /// several ranks, also returns which rank computes longest, and how much longer than the
    /// median. A rank that is alone has no communication. Empty if there were too few steps.
    std::string summary(const World& world) const;

  private:
    static constexpr int64_t warm_up = 2;

    int64_t steps_ = 0;
    StepTimes sum_;
};

}  // namespace train_gpt
