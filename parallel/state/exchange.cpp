#include "parallel/state/exchange.h"

#include <utility>

#include "device/trace.h"

namespace train_gpt {

Exchange::Exchange(std::shared_ptr<Stream> stream, std::vector<std::string> groups,
                   StepClock* clock)
    : stream_(std::move(stream)), clock_(clock) {
    if (beside()) submitted_ = Event(stream_->device);
    add_slots(std::move(groups));
}

Exchange::Exchange(const Exchange& other, std::vector<std::string> groups)
    : Exchange(other.stream_, std::move(groups), other.clock_) {}

int Exchange::add_slots(std::vector<std::string> groups) {
    const int first = static_cast<int>(groups_.size());
    for (std::string& group : groups) {
        groups_.push_back(std::move(group));
        done_.push_back(beside() ? Event(stream_->device) : Event());
        waited_for_.push_back(true);
    }
    return first;
}

void Exchange::submit(Stream& stream, int slot, const std::function<void(Stream&)>& work) {
    if (!beside()) {
        const StepClock::Interval interval(clock_, stream, StepPhase::communication,
                                           groups_[static_cast<size_t>(slot)]);
        work(stream);
        return;
    }
    submitted_.record(stream);
    submitted_.hold(*stream_);
    work(*stream_);
    done_[static_cast<size_t>(slot)].record(*stream_);
    waited_for_[static_cast<size_t>(slot)] = false;
}

void Exchange::hold_other(Stream& stream, int slot) {
    if (beside()) done_[static_cast<size_t>(slot)].hold(stream);
}

void Exchange::hold(Stream& stream, int slot) {
    if (waited_for_[static_cast<size_t>(slot)]) return;
    const TraceSpan span(TraceTrack::device, stream, "wait for the exchange");
    const StepClock::Interval interval(clock_, stream, StepPhase::communication,
                                       groups_[static_cast<size_t>(slot)]);
    done_[static_cast<size_t>(slot)].hold(stream);
    waited_for_[static_cast<size_t>(slot)] = true;
}

}  // namespace train_gpt
