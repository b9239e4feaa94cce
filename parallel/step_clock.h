// Where the time of a step goes, as the device sees it. On a GPU, events in the stream of the
// model's work measure it. Communication and data count only while the model's work waits for them.
#pragma once
#include <array>
#include <cstddef>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/stream.h"

namespace train_gpt {

enum class StepPhase : uint8_t { compute, communication, data, optimizer, count };
constexpr const char* name_of(StepPhase phase) {
    constexpr const char* names[] = {"compute", "communication", "data wait", "optimizer"};
    return names[static_cast<size_t>(phase)];
}

struct StepTimes {
    std::array<double, static_cast<size_t>(StepPhase::count)> seconds{};  // by phase
    /// The seconds of StepPhase::communication, by the group of ranks that was waited for
    /// (MeshLayout::group_name).
    std::map<std::string, double> exposed;

    double& operator[](StepPhase phase) { return seconds[static_cast<size_t>(phase)]; }
    double operator[](StepPhase phase) const { return seconds[static_cast<size_t>(phase)]; }
    double total() const {
        double sum = 0;
        for (const double s : seconds) sum += s;
        return sum;
    }
    void add(const StepTimes& other) {
        for (size_t i = 0; i < seconds.size(); ++i) seconds[i] += other.seconds[i];
        for (const auto& [group, s] : other.exposed) exposed[group] += s;
    }
};

/// The bubble as a rank sees it: the share of a step in which the rank waits for other stages of
/// its pipeline.
inline double bubble_share(const StepTimes& times) {
    const auto waited = times.exposed.find("pipeline");
    return waited == times.exposed.end() ? 0 : waited->second / times.total();
}

class StepClock {
  public:
    explicit StepClock(const Device& device) : device_(device) {}

    /// Begins a step, in the compute phase.
    void begin(Stream& stream);
    void end(Stream& stream);
    /// Drops the step that has begun.
    void drop();
    /// Takes the oldest step that has ended from the queue: waits for it and returns its times.
    StepTimes pop();

    /// While an Interval exists, the stream's time counts for its phase. `group`: for
    /// communication, the group of ranks that is waited for. Does nothing outside of a step, or if
    /// `clock` is null.
    class Interval {
      public:
        Interval(StepClock* clock, Stream& stream, StepPhase phase, const std::string& group = {});
        ~Interval();
        Interval(const Interval&) = delete;
        Interval& operator=(const Interval&) = delete;

      private:
        StepClock* clock_;
        Stream& stream_;
        StepPhase before_ = StepPhase::compute;
        std::string group_before_;
    };

  private:
    struct Mark {
        Event event;
        StepPhase phase;  // after the event
        std::string group;
    };
    struct Step {
        std::vector<Mark> marks;  // the first `used` are valid; the others can be reused
        size_t used = 0;
    };
    void mark(Stream& stream, StepPhase phase, const std::string& group);

    Device device_;
    std::deque<Step> ended_;
    std::vector<Step> spare_;
    Step now_;
    bool running_ = false;
    StepPhase phase_ = StepPhase::compute;
    std::string group_;
};

}  // namespace train_gpt
