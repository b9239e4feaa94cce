#include "parallel/pipeline/stage_messages.h"

#include <algorithm>
#include <cassert>
#include <optional>

#include "device/profile.h"
#include "device/trace.h"
#include "parallel/mesh.h"

namespace train_gpt {

namespace {

constexpr const char* wait_for_stage = "wait for a stage";

}  // namespace

StageMessages::StageMessages(const PipelineSchedule& schedule, int rank, DType dtype, int64_t rows,
                             int64_t columns, Arena& arena)
    : dtype_(dtype) {
    const int p = schedule.shape.ranks;
    if (p == 1) return;
    // A send waits only if the peer has not even posted the receives of those before.
    const PipelineRank &mine = schedule.ranks[static_cast<size_t>(rank)],
                       &next = schedule.ranks[static_cast<size_t>((rank + 1) % p)],
                       &last = schedule.ranks[static_cast<size_t>((rank + p - 1) % p)];
    const auto take = [&](std::vector<Buffer>& buffers, int n) {
        for (int i = 0; i < n; ++i) {
            Buffer& buffer = buffers.emplace_back();
            buffer.memory = arena.tensor(dtype, {rows, columns}, Purpose::buffers);
            if (!arena.device().is_cuda() || arena.is_counting()) continue;
            buffer.moved = Event(arena.device());
            buffer.used = Event(arena.device());
        }
    };
    const auto sends = [](int buffers) { return buffers > 0 ? buffers + 1 : 0; };
    Side &activations = side(Kind::activation), &gradients = side(Kind::gradient);
    take(activations.receives, mine.activation_buffers);
    take(gradients.receives, mine.gradient_buffers);
    const auto any = [&](PipelineWork work) {
        return std::ranges::any_of(mine.actions,
                                   [&](const PipelineAction& a) { return a.work == work; });
    };
    if (any(PipelineWork::send_activation)) take(activations.sends, sends(next.activation_buffers));
    if (any(PipelineWork::send_gradient)) take(gradients.sends, sends(last.gradient_buffers));
}

void StageMessages::connect(const Device& device, Communicator& pipeline, StepClock* clock) {
    pipeline_ = &pipeline;
    clock_ = clock;
    if (!device.is_cuda()) return;
    stream_ = pipeline.exchange_stream(device);
    turn_ = Event(device);
}

/// Later work of the stream finds the buffer's last message finished.
void StageMessages::wait(Stream& stream, Buffer& buffer) {
    const StepClock::Interval interval(clock_, stream, StepPhase::communication,
                                       name_of(Axis::pipeline));
    std::optional<TraceSpan> span;
    if (stream_) span.emplace(TraceTrack::device, stream, wait_for_stage);
    const Profiled profiled(stream, {.kind = wait_for_stage});
    if (stream_)
        buffer.moved.hold(stream);
    else
        pipeline_->finish(buffer.message);
    buffer.moves = false;
}

Tensor StageMessages::send_buffer(Stream& stream, Kind kind) {
    Side& side = this->side(kind);
    Buffer& buffer = side.sends[side.next];
    if (!pipeline_) return buffer.memory;
    if (buffer.moves) wait(stream, buffer);
    return buffer.memory;
}

void StageMessages::send(Stream& stream, Kind kind, int to) {
    if (!pipeline_) return;
    Side& side = this->side(kind);
    Buffer& buffer = side.sends[side.next];
    side.next = (side.next + 1) % side.sends.size();
    if (stream_) {
        buffer.used.record(stream);
        buffer.used.hold(*stream_);
    }
    Stream& on = stream_ ? *stream_ : stream;
    const TraceSpan span(TraceTrack::exchange, on, "send to pipeline rank", to);
    buffer.message =
        pipeline_->post_send(on, buffer.memory.data, buffer.memory.numel(), dtype_, to);
    buffer.moves = true;
    if (stream_) buffer.moved.record(*stream_);
}

void StageMessages::receive(Stream& stream, Kind kind, int index, int from) {
    if (!pipeline_) return;
    Buffer& buffer = side(kind).receives[static_cast<size_t>(index)];
    if (stream_ && buffer.was_used) buffer.used.hold(*stream_);
    Stream& on = stream_ ? *stream_ : stream;
    const TraceSpan span(TraceTrack::exchange, on, "receive from pipeline rank", from);
    buffer.message =
        pipeline_->post_receive(on, buffer.memory.data, buffer.memory.numel(), dtype_, from);
    buffer.moves = true;
    if (stream_) buffer.moved.record(*stream_);
}

Tensor StageMessages::wait(Stream& stream, Kind kind, int index) {
    Buffer& buffer = side(kind).receives[static_cast<size_t>(index)];
    if (!pipeline_) return buffer.memory;
    wait(stream, buffer);
    return buffer.memory;
}

void StageMessages::release(Stream& stream, Kind kind, int index) {
    if (!stream_) return;
    Buffer& buffer = side(kind).receives[static_cast<size_t>(index)];
    buffer.used.record(stream);
    buffer.was_used = true;
}

void StageMessages::broadcast(Stream& stream, float* data, int64_t n, int root) {
    if (!pipeline_) return;
    if (!stream_) return pipeline_->broadcast(stream, data, n, DType::fp32, root);
    turn_.record(stream);
    turn_.hold(*stream_);
    pipeline_->broadcast(*stream_, data, n, DType::fp32, root);
    turn_.record(*stream_);
    turn_.hold(stream);
}

std::vector<Tensor> StageMessages::buffers() const {
    std::vector<Tensor> all;
    for (const Side& side : sides_)
        for (const std::vector<Buffer>* buffers : {&side.sends, &side.receives})
            for (const Buffer& buffer : *buffers) all.push_back(buffer.memory);
    return all;
}

}  // namespace train_gpt
