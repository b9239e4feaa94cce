#include "device/profile.h"

#include <algorithm>

#ifdef TRAIN_GPT_CUDA
#include <nvtx3/nvToolsExt.h>
#endif

namespace train_gpt {

struct Profiler::Calls {
    struct Call {
        size_t total;  // index of its kind in totals
        Event first, last;
    };
    Device device;
    std::vector<Total> totals;
    std::vector<Call> open;  // their seconds are not yet in totals
};

Profiler::Profiler(Device device) : calls_(std::make_unique<Calls>()) { calls_->device = device; }
Profiler::~Profiler() = default;

void Profiler::begin(Stream& stream, const Cost& cost) {
    if (depth_++ > 0) return;
    auto& totals = calls_->totals;
    auto found = std::find_if(totals.begin(), totals.end(),
                              [&](const Total& t) { return t.kind == cost.kind; });
    if (found == totals.end()) found = totals.insert(totals.end(), Total{.kind = cost.kind});
    ++found->calls;
    found->bytes += cost.bytes;
    found->flops += cost.flops;
    const auto timing = [&] { return Event(calls_->device, Event::Kind::timing); };
    calls_->open.push_back({static_cast<size_t>(found - totals.begin()), timing(), timing()});
    calls_->open.back().first.record(stream);
}

void Profiler::end(Stream& stream) {
    if (--depth_ > 0) return;
    calls_->open.back().last.record(stream);
}

std::vector<Profiler::Total> Profiler::totals() {
    for (const Calls::Call& call : calls_->open)
        calls_->totals[call.total].seconds += call.last.seconds_since(call.first);
    calls_->open.clear();
    return calls_->totals;
}

Profiled::Profiled(Stream& stream, const Cost& cost) : stream_(stream) {
#ifdef TRAIN_GPT_CUDA
    if (stream.device.is_cuda()) nvtxRangePushA(cost.kind);
#endif
    if (stream.is_part) return;
    if (!stream.device.is_cuda()) span_.emplace(TraceTrack::device, stream, cost.kind);
    if (stream.profiler) stream.profiler->begin(stream, cost);
}

Profiled::~Profiled() {
    if (stream_.profiler && !stream_.is_part) stream_.profiler->end(stream_);
#ifdef TRAIN_GPT_CUDA
    if (stream_.device.is_cuda()) nvtxRangePop();
#endif
}

}  // namespace train_gpt
