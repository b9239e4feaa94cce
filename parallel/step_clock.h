// Where the time of a step goes, as the device sees it: on a GPU from events in the stream of the model's work, so that
// communication and data count only where that work waits for them.
#pragma once
#include <array>
#include <cstddef>
#include <deque>
#include <vector>

#include "device/device.h"

namespace train_gpt {

enum class StepPhase : uint8_t { compute, communication, data, optimizer, count };
constexpr const char* name_of(StepPhase phase) {
    constexpr const char* names[] = {"compute", "communication", "data wait", "optimizer"};
    return names[static_cast<size_t>(phase)];
}

/// Seconds by phase.
struct StepTimes {
    std::array<double, static_cast<size_t>(StepPhase::count)> seconds{};

    double& operator[](StepPhase phase) { return seconds[static_cast<size_t>(phase)]; }
    double operator[](StepPhase phase) const { return seconds[static_cast<size_t>(phase)]; }
    double total() const {
        double sum = 0;
        for (const double s : seconds) sum += s;
        return sum;
    }
    void add(const StepTimes& other) {
        for (size_t i = 0; i < seconds.size(); ++i) seconds[i] += other.seconds[i];
    }
};

class StepClock {
  public:
    explicit StepClock(const Device& device) : device_(device) {}

    /// A step begins, in the phase of computing.
    void begin(Stream& stream);
    void end(Stream& stream);
    /// A step that began does not end.
    void drop();
    /// Times of the oldest step that ended and was not popped; waits for it.
    StepTimes pop();

    /// While it lives, the stream's time belongs to another phase. Nothing outside of steps, or without a clock.
    class Interval {
      public:
        Interval(StepClock* clock, Stream& stream, StepPhase phase);
        ~Interval();
        Interval(const Interval&) = delete;
        Interval& operator=(const Interval&) = delete;

      private:
        StepClock* clock_;
        Stream& stream_;
        StepPhase before_;
    };

  private:
    struct Mark {
        Event event;
        StepPhase phase;  // from here on
    };
    struct Step {
        std::vector<Mark> marks;  // the first `used`; the others wait to be used again
        size_t used = 0;
    };
    void mark(Stream& stream, StepPhase phase);

    Device device_;
    std::deque<Step> ended_;
    std::vector<Step> spare_;
    Step now_;
    bool running_ = false;
    StepPhase phase_ = StepPhase::compute;
};

}  // namespace train_gpt
