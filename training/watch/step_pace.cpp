#include "training/watch/step_pace.h"

#include <cassert>
#include <numeric>

namespace train_gpt {

void StepPace::add(double seconds, const StepTimes& times) {
    seconds_ += seconds;
    times_.add(times);
    if (++steps_ == 2 || recent_.size() == window) recent_.pop_front();
    recent_.push_back(seconds);
}

StepPace::Mean StepPace::take() {
    assert(steps_ > taken_);
    const auto n = static_cast<double>(steps_ - taken_);
    Mean mean{seconds_ / n, times_};
    for (double& seconds : mean.times.seconds) seconds /= n;
    for (auto& [group, seconds] : mean.times.exposed) seconds /= n;
    taken_ = steps_;
    seconds_ = 0;
    times_ = {};
    return mean;
}

double StepPace::recent() const {
    if (recent_.empty()) return 0;
    return std::accumulate(recent_.begin(), recent_.end(), 0.0) /
           static_cast<double>(recent_.size());
}

}  // namespace train_gpt
