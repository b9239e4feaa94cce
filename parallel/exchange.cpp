#include "parallel/exchange.h"

#include "device/trace.h"

namespace train_gpt {

Exchange::Exchange(const Device& device, bool has_others, int slots, StepClock* clock,
                   StepPhase phase)
    : has_others_(has_others),
      stream_(device, !has_others, Stream::Priority::high),
      clock_(clock),
      phase_(phase),
      done_(static_cast<size_t>(slots)),
      waited_for_(static_cast<size_t>(slots), true) {
    if (!beside()) return;
    submitted_ = Event(device);
    for (Event& event : done_) event = Event(device);
}

void Exchange::submit(Stream& stream, int slot, const std::function<void(Stream&)>& work) {
    if (!beside()) {
        const StepClock::Interval interval(clock_, stream, phase_);
        work(stream);
        return;
    }
    submitted_.record(stream);
    submitted_.hold(stream_);
    work(stream_);
    done_[static_cast<size_t>(slot)].record(stream_);
    waited_for_[static_cast<size_t>(slot)] = false;
}

void Exchange::hold_other(Stream& stream, int slot) {
    if (beside()) done_[static_cast<size_t>(slot)].hold(stream);
}

void Exchange::hold(Stream& stream, int slot) {
    if (waited_for_[static_cast<size_t>(slot)]) return;
    const TraceSpan span(TraceTrack::device, stream, "wait for the exchange");
    const StepClock::Interval interval(clock_, stream, phase_);
    done_[static_cast<size_t>(slot)].hold(stream);
    waited_for_[static_cast<size_t>(slot)] = true;
}

}  // namespace train_gpt
