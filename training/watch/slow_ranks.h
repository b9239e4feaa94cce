// Names ranks that make all others wait.
//
// All ranks take the same time for a step, since the fast ones wait for the slow ones. So ranks are
// compared by their own work: compute, waiting for data, and the optimizer, but not waiting for
// communication. A rank is slow if over 50 steps
//
//     own work of a micro-batch   > 1.5 × the median of the other ranks of its pipeline stage,
//     what it works longer        ≥ a tenth of the time of the steps
//
// Ranks may have different numbers of micro-batches, and stages may have different layers. The
// second condition leaves out steps that are so short that noise is most of them.
#pragma once
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "parallel/step_clock.h"
#include "parallel/world.h"

namespace train_gpt {

/// What a rank did in a number of steps.
struct MeasuredWork {
    std::string host;
    StepTimes times;            // sums; without StepTimes::exposed
    int64_t micro_batches = 1;  // in all of these steps
    int stage = 0;              // the rank's place along the pipeline

    double own_seconds() const { return times.total() - times[StepPhase::communication]; }
};

struct SlowWork {
    int rank = 0;
    double ratio = 1;  // own work of a micro-batch, by the median of the others

    bool operator==(const SlowWork&) const = default;
};
/// The slow ranks among all ranks, by rank.
std::vector<SlowWork> find_slow_work(std::span<const MeasuredWork> ranks);

class SlowWorkWatch {
  public:
    static constexpr int64_t steps = 50;

    /// Takes a step of this rank.
    void add(const StepTimes& times, int64_t micro_batches);
    /// Whether take() is due: after every 50 steps. The same on all ranks.
    bool is_due() const { return steps_ == steps; }
    /// All ranks call it when it is due, which exchanges a message with rank 0. last_step: the last
    /// one. stage: this rank's place along the pipeline. Returns a line for each rank that is slow
    /// now and was not in the 50 steps before: "rank 5 (host nodeB) is slow: …".
    std::vector<std::string> take(int64_t last_step, const World& world, int stage);

  private:
    int64_t steps_ = 0;
    MeasuredWork work_;
    std::set<int> slow_;  // ranks
};

}  // namespace train_gpt
