#include "test/parallel/peak_slots.h"

#include <algorithm>

namespace train_gpt {

std::vector<int> peak_slots(const PipelineTimeline& timeline, int stages) {
    std::vector<int> peaks(static_cast<size_t>(stages)), slots(peaks.size());
    for (const std::vector<TimedAction>& computes : timeline.computes)
        for (const TimedAction& timed : computes) {
            const auto stage = static_cast<size_t>(timed.action.stage);
            const PipelineWork work = timed.action.work;
            slots[stage] += work == PipelineWork::forward;
            peaks[stage] = std::max(peaks[stage], slots[stage]);
            slots[stage] -=
                work == PipelineWork::backward || work == PipelineWork::backward_weights;
        }
    return peaks;
}

}  // namespace train_gpt
