// What a step adds up over its tokens and over all ranks, besides the gradient.
#pragma once
#include <cstdint>

#include "dataloader/mixture.h"

namespace train_gpt {

/// The sums lie one after the other in the device's memory. The optimizer adds up the sums of all
/// ranks in the same exchange as the norm.
struct StepSums {
    double loss = 0;           // in nats
    double stop_requests = 0;  // each rank that wants the run to stop after this step adds 1
    double save_progress = 0;  // of the checkpoint that is written in the background
    double loss_of_source[Mixture::max_sources] = {};  // if training data have several sources

    /// How many sums a step has if training data have so many sources.
    static constexpr int64_t count(int sources) { return 3 + (sources > 1 ? sources : 0); }
};
static_assert(sizeof(StepSums) ==
              static_cast<size_t>(StepSums::count(Mixture::max_sources)) * sizeof(double));

}  // namespace train_gpt
