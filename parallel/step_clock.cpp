#include "parallel/step_clock.h"

#include <cassert>
#include <utility>

namespace train_gpt {

void StepClock::mark(Stream& stream, StepPhase phase, const std::string& group) {
    if (now_.used == now_.marks.size())
        now_.marks.push_back({Event(device_, Event::Kind::timing), phase, group});
    Mark& mark = now_.marks[now_.used++];
    mark.event.record(stream);
    mark.phase = phase_ = phase;
    mark.group = group_ = group;
}

void StepClock::begin(Stream& stream) {
    running_ = true;
    mark(stream, StepPhase::compute, {});
}

void StepClock::end(Stream& stream) {
    mark(stream, StepPhase::compute, {});
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
    for (size_t i = 0; i + 1 < step.used; ++i) {
        const Mark& mark = step.marks[i];
        const double seconds = step.marks[i + 1].event.seconds_since(mark.event);
        times[mark.phase] += seconds;
        if (mark.phase == StepPhase::communication) times.exposed[mark.group] += seconds;
    }
    step.used = 0;
    spare_.push_back(std::move(step));
    ended_.pop_front();
    return times;
}

StepClock::Interval::Interval(StepClock* clock, Stream& stream, StepPhase phase,
                              const std::string& group)
    : clock_(clock && clock->running_ ? clock : nullptr), stream_(stream) {
    if (!clock_) return;
    before_ = clock_->phase_;
    group_before_ = clock_->group_;
    clock_->mark(stream_, phase, group);
}

StepClock::Interval::~Interval() {
    if (clock_ && clock_->running_) clock_->mark(stream_, before_, group_before_);
}

}  // namespace train_gpt
