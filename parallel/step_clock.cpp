#include "parallel/step_clock.h"

#include <cassert>
#include <utility>

namespace train_gpt {

void StepClock::mark(Stream& stream, StepPhase phase) {
    if (now_.used == now_.marks.size())
        now_.marks.push_back({Event(device_, Event::Kind::timing), phase});
    Mark& mark = now_.marks[now_.used++];
    mark.event.record(stream);
    mark.phase = phase_ = phase;
}

void StepClock::begin(Stream& stream) {
    running_ = true;
    mark(stream, StepPhase::compute);
}

void StepClock::end(Stream& stream) {
    mark(stream, StepPhase::compute);
    ended_.push_back(std::move(now_));
    now_ = {};
    if (!spare_.empty()) {
        now_ = std::move(spare_.back());
        spare_.pop_back();
    }
    running_ = false;
}

void StepClock::drop() {
    now_.used = 0;
    running_ = false;
}

StepTimes StepClock::pop() {
    assert(!ended_.empty());
    Step& step = ended_.front();
    StepTimes times;
    for (size_t i = 0; i + 1 < step.used; ++i)
        times[step.marks[i].phase] += step.marks[i + 1].event.seconds_since(step.marks[i].event);
    step.used = 0;
    spare_.push_back(std::move(step));
    ended_.pop_front();
    return times;
}

StepClock::Interval::Interval(StepClock* clock, Stream& stream, StepPhase phase)
    : clock_(clock && clock->running_ ? clock : nullptr), stream_(stream), before_(phase) {
    if (!clock_) return;
    before_ = clock_->phase_;
    clock_->mark(stream_, phase);
}

StepClock::Interval::~Interval() {
    if (clock_ && clock_->running_) clock_->mark(stream_, before_);
}

}  // namespace train_gpt
