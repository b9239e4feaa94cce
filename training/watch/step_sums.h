// What a step adds up over its tokens and over all ranks, besides the gradient.
#pragma once
#include <cstdint>

#include "dataloader/mixture.h"

namespace train_gpt {

/// One sum after the other in the device's memory, where the optimizer adds up those of all ranks
/// in the same exchange as the norm.
struct StepSums {
    double loss = 0;           // in nats
    double stop_requests = 0;  // 1 of each rank that wants the run to stop after this step
    double loss_of_source[Mixture::max_sources] = {};  // if training data come from several

    /// The number of these sums in a step with this many sources of training data.
    static constexpr int64_t count(int sources) { return 2 + (sources > 1 ? sources : 0); }
};
static_assert(sizeof(StepSums) ==
              static_cast<size_t>(StepSums::count(Mixture::max_sources)) * sizeof(double));

}  // namespace train_gpt
