#include "device/trace.h"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "base/stopwatch.h"

#ifdef TRAIN_GPT_CUDA
#include <nvtx3/nvToolsExt.h>
#endif

namespace train_gpt {

namespace {

thread_local Tracer* active_tracer = nullptr;

}  // namespace

void Tracer::count() {
    counts_ = true;
    active_tracer = this;
}

void Tracer::reserve(size_t spans, size_t steps) {
    counts_ = false;
    spans_ = events_used_ = references_used_ = 0;
    recorded_.clear();
    recorded_.reserve(spans);
    if (!device_.is_cuda()) return;
    const auto fill = [&](std::vector<Event>& events, size_t n) {
        events.clear();
        events.reserve(n);
        for (size_t i = 0; i < n; ++i) events.emplace_back(device_, Event::Kind::timing);
    };
    fill(events_, 2 * spans);
    fill(references_, steps);
}

void Tracer::activate(Stream& stream) {
    if (device_.is_cuda() && references_used_ == 0) {
        refer(stream);
        // Another process may run between the two clocks. So a short reading counts, compared with
        // some others.
        double shortest = std::numeric_limits<double>::infinity();
        for (int readings = 1; readings <= 20; ++readings) {
            const double before = monotonic_seconds();
            references_[0].record(stream);
            references_[0].wait();
            const double after = monotonic_seconds();
            first_reference_at_ = (before + after) / 2;
            shortest = std::min(shortest, after - before);
            if (readings >= 5 && after - before <= 2 * shortest) break;
        }
    }
    active_tracer = this;
}

void Tracer::deactivate() {
    if (active_tracer == this) active_tracer = nullptr;
}

void Tracer::begin_step(Stream& stream, int64_t step) {
    step_ = step;
    if (device_.is_cuda() && !counts_ && references_used_ > 0) refer(stream);
}

void Tracer::refer(Stream& stream) {
    if (references_used_ < references_.size()) references_[references_used_++].record(stream);
}

std::ptrdiff_t Tracer::open(TraceTrack track, Stream* stream, const char* name, int number) {
    ++spans_;
    if (counts_ || recorded_.size() == recorded_.capacity()) return -1;
    Recorded& recorded = recorded_.emplace_back();
    recorded.span = {
        .track = track, .name = name, .number = number, .step = step_, .begin = 0, .end = 0};
    if (stream && device_.is_cuda()) {
        recorded.reference = references_used_ - 1;
        recorded.first_event = static_cast<std::ptrdiff_t>(events_used_);
        events_[events_used_].record(*stream);
        events_used_ += 2;
    } else {
        recorded.span.begin = monotonic_seconds();
    }
    return std::ssize(recorded_) - 1;
}

void Tracer::close(std::ptrdiff_t span, Stream* stream) {
    if (span < 0) return;
    Recorded& recorded = recorded_[static_cast<size_t>(span)];
    if (recorded.first_event >= 0)
        events_[static_cast<size_t>(recorded.first_event) + 1].record(*stream);
    else
        recorded.span.end = monotonic_seconds();
}

std::vector<TracedSpan> Tracer::collect() const {
    std::vector<double> reference_at(references_used_);
    for (size_t i = 0; i < references_used_; ++i)
        reference_at[i] =
            i == 0 ? first_reference_at_
                   : reference_at[i - 1] + references_[i].seconds_since(references_[i - 1]);
    std::vector<TracedSpan> spans;
    spans.reserve(recorded_.size());
    for (const Recorded& recorded : recorded_) {
        TracedSpan span = recorded.span;
        if (recorded.first_event >= 0) {
            const auto first = static_cast<size_t>(recorded.first_event);
            const Event& reference = references_[recorded.reference];
            span.begin = reference_at[recorded.reference] + events_[first].seconds_since(reference);
            span.end =
                reference_at[recorded.reference] + events_[first + 1].seconds_since(reference);
        }
        spans.push_back(span);
    }
    return spans;
}

TraceSpan::TraceSpan(TraceTrack track, const char* name, int number) : tracer_(active_tracer) {
    if (tracer_) span_ = tracer_->open(track, nullptr, name, number);
}

TraceSpan::TraceSpan(TraceTrack track, Stream& stream, const char* name, int number)
    : tracer_(active_tracer), stream_(&stream) {
#ifdef TRAIN_GPT_CUDA
    named_range_ = track == TraceTrack::device && stream.device.is_cuda();
    if (named_range_) {
        char text[64];
        std::snprintf(text, sizeof text, number < 0 ? "%s" : "%s %d", name, number);
        nvtxRangePushA(text);
    }
#endif
    if (tracer_) span_ = tracer_->open(track, stream_, name, number);
}

TraceSpan::~TraceSpan() {
    if (tracer_) tracer_->close(span_, stream_);
#ifdef TRAIN_GPT_CUDA
    if (named_range_) nvtxRangePop();
#endif
}

}  // namespace train_gpt
