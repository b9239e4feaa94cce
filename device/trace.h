// A timeline of what this process does, for a few steps: spans of the device, of collectives, of
// the host and of waiting for data. When no tracer is active, a span costs a look at one pointer,
// and a span of the device also a named range for NVIDIA's tools on a GPU.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/device.h"
#include "device/stream.h"

namespace train_gpt {

/// Rows of the timeline.
enum class TraceTrack : uint8_t { host, data, device, exchange, to_host, from_host, count };
constexpr const char* name_of(TraceTrack track) {
    constexpr const char* names[] = {"host", "data", "device", "exchange", "to host", "from host"};
    return names[static_cast<size_t>(track)];
}

struct TracedSpan {
    TraceTrack track;
    const char* name;       // a literal
    int number;             // of the layer, bucket, … of this name; −1: none
    int64_t step;           // counted from 1
    double begin, end = 0;  // seconds, on the clock of monotonic_seconds()
};

/// Records the spans of the thread that activates it. Spans in a stream are taken with the device's
/// clock: on a GPU by events in the stream, so recording neither waits nor, after reserve(),
/// allocates.
class Tracer {
  public:
    explicit Tracer(Device device) : device_(device) {}
    ~Tracer() { deactivate(); }
    Tracer(const Tracer&) = delete;
    Tracer& operator=(const Tracer&) = delete;

    /// From now on the spans of this thread are only counted.
    void count();
    /// Spans that were counted or recorded since reserve(), or since the beginning.
    size_t spans() const { return spans_; }
    /// Makes room for so many spans, within so many calls of activate() and begin_step(). Forgets
    /// earlier ones.
    void reserve(size_t spans, size_t steps);

    /// From now on the spans of this thread are recorded. The device must be idle.
    void activate(Stream& stream);
    void deactivate();
    /// Later spans belong to this step.
    void begin_step(Stream& stream, int64_t step);

    /// The recorded spans, in the order in which they began on the host. Waits for the device.
    std::vector<TracedSpan> collect() const;
    /// Spans for which there was no room.
    size_t lost() const { return spans_ - recorded_.size(); }

  private:
    friend class TraceSpan;
    /// Returns the span's index; −1 if it is not recorded. stream: null for the host's clock.
    std::ptrdiff_t open(TraceTrack track, Stream* stream, const char* name, int number);
    void close(std::ptrdiff_t span, Stream* stream);
    void refer(Stream& stream);

    struct Recorded {
        TracedSpan span;
        std::ptrdiff_t first_event = -1;  // of two; −1: the span's times are known
        size_t reference = 0;
    };
    Device device_;
    bool counts_ = false;
    size_t spans_ = 0;
    int64_t step_ = 0;
    std::vector<Recorded> recorded_;
    std::vector<Event> events_;
    size_t events_used_ = 0;
    // CUDA gives the time between two events as a float, so it is taken from one of the same step.
    std::vector<Event> references_;
    size_t references_used_ = 0;
    double first_reference_at_ = 0;  // seconds, on the clock of monotonic_seconds()
};

/// A span of this thread's active tracer, for as long as the object lives.
class TraceSpan {
  public:
    /// On the host's clock.
    explicit TraceSpan(TraceTrack track, const char* name, int number = -1);
    /// From the work submitted to the stream so far to the work submitted while the object lives.
    TraceSpan(TraceTrack track, Stream& stream, const char* name, int number = -1);
    ~TraceSpan();
    TraceSpan(const TraceSpan&) = delete;
    TraceSpan& operator=(const TraceSpan&) = delete;

  private:
    Tracer* tracer_;
    Stream* stream_ = nullptr;
    std::ptrdiff_t span_ = -1;
    bool named_range_ = false;
};

}  // namespace train_gpt
