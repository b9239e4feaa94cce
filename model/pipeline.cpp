#include "model/pipeline.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/random.h"
#include "device/copy.h"
#include "device/trace.h"

namespace train_gpt {

namespace {

StageMessages messages_of(const PipelineSchedule& schedule, int rank, const Stage& stage,
                          Arena& arena) {
    const StageOptions& o = stage.options();
    const int64_t ranks = o.tensor ? o.tensor->size() : 1;
    return {schedule, rank, stage.dtype(), int64_t{o.B} * o.T / ranks, stage.spec().n_embd, arena};
}

}  // namespace

Pipeline::Pipeline(Stage& whole)
    : schedule_(pipeline_schedule({})),
      stages_{&whole},
      messages_(std::make_unique<StageMessages>()) {}

Pipeline::Pipeline(const PipelineShape& shape, int rank, std::vector<Stage*> stages, Arena& arena)
    : schedule_(pipeline_schedule(shape)),
      rank_(rank),
      stages_(std::move(stages)),
      messages_(
          std::make_unique<StageMessages>(messages_of(schedule_, rank, *stages_.front(), arena))) {
    assert(std::ssize(stages_) == schedule_.stages / ranks());
}

size_t Pipeline::scratch_bytes(const Stream& stream) const {
    size_t most = 0;
    for (const Stage* stage : stages_) most = std::max(most, stage->scratch_bytes(stream));
    return most;
}

int Pipeline::batches_in_use() const {
    const int stages = static_cast<int>(stages_.size());
    std::vector<int> unfinished(static_cast<size_t>(schedule_.shape.micro_batches), stages);
    int most = 0, oldest = 0, newest = -1;
    for (const PipelineAction& a : schedule_.ranks[static_cast<size_t>(rank_)].actions) {
        if (a.work == PipelineWork::forward) newest = std::max(newest, a.micro_batch);
        most = std::max(most, newest - oldest + 1);
        if (a.work != PipelineWork::backward && a.work != PipelineWork::backward_weights) continue;
        --unfinished[static_cast<size_t>(a.micro_batch)];
        while (oldest <= newest && unfinished[static_cast<size_t>(oldest)] == 0) ++oldest;
    }
    return most;
}

const std::vector<PipelineAction>& Pipeline::actions(int most_micro_batches) {
    const PipelineSchedule* schedule = &schedule_;
    if (most_micro_batches != schedule_.shape.micro_batches) {
        PipelineShape shape = schedule_.shape;
        shape.micro_batches = most_micro_batches;
        assert(ranks() == 1 || most_micro_batches < schedule_.shape.micro_batches);
        if (shorter_.shape.micro_batches != most_micro_batches || shorter_.ranks.empty())
            shorter_ = pipeline_schedule(shape);
        schedule = &shorter_;
    }
    return schedule->ranks[static_cast<size_t>(rank_)].actions;
}

void Pipeline::execute(Stream& stream, const PipelineAction& action,
                       const TokenBatch& batch) const {
    switch (action.work) {
        case PipelineWork::send_activation:
            return messages_->send(stream, Kind::activation, schedule_.peer_of(action));
        case PipelineWork::send_gradient:
            return messages_->send(stream, Kind::gradient, schedule_.peer_of(action));
        case PipelineWork::receive_activation:
            return messages_->receive(stream, Kind::activation, action.buffer,
                                      schedule_.peer_of(action));
        case PipelineWork::receive_gradient:
            return messages_->receive(stream, Kind::gradient, action.buffer,
                                      schedule_.peer_of(action));
        default:
            return compute(stream, action, batch);
    }
}

void Pipeline::compute(Stream& stream, const PipelineAction& action, const TokenBatch& batch,
                       bool backward_follows) const {
    Stage& stage = this->stage(action.stage);
    const bool forward = action.work == PipelineWork::forward;
    const TraceSpan span(TraceTrack::device, stream,
                         forward                                         ? "forward"
                         : action.work == PipelineWork::backward_weights ? "backward of weights"
                                                                         : "backward");
    if (action.work == PipelineWork::backward_weights)
        return stage.backward_weights(stream, action.slot, batch);
    const Kind in_kind = forward ? Kind::activation : Kind::gradient, out_kind = in_kind;
    const bool reads = action.buffer >= 0,
               writes = forward ? !is_last(action.stage) : !is_first(action.stage);
    const Tensor in = reads ? messages_->wait(stream, in_kind, action.buffer) : Tensor{};
    const Tensor out = writes ? messages_->send_buffer(stream, out_kind) : Tensor{};
    if (forward)
        stage.forward(stream, action.slot, batch, in, out, backward_follows);
    else if (action.work == PipelineWork::backward)
        stage.backward(stream, action.slot, batch, in, out);
    else
        stage.backward_inputs(stream, action.slot, batch, in, out);
    if (reads) messages_->release(stream, in_kind, action.buffer);
}

void Pipeline::skip(Stream& stream, const PipelineAction& action) const {
    Stage& stage = this->stage(action.stage);
    switch (action.work) {
        case PipelineWork::forward:
            return stage.skip_forward(stream);
        case PipelineWork::backward:
            return stage.skip_backward(stream, Backward::both);
        case PipelineWork::backward_inputs:
            return stage.skip_backward(stream, Backward::inputs);
        case PipelineWork::backward_weights:
            return stage.skip_backward(stream, Backward::weights);
        default:
            return;  // messages
    }
}

void Pipeline::forward(Stream& stream, const TokenBatch& batch) const {
    for (const int number : schedule_.stages_of(rank_)) {
        PipelineAction action{.stage = number, .slot = 0};
        if (!is_first(number)) {
            action.buffer = 0;
            messages_->receive(stream, Kind::activation, 0, schedule_.rank_of(number - 1));
        }
        compute(stream, action, batch, false);
        if (!is_last(number))
            messages_->send(stream, Kind::activation, schedule_.rank_of(number + 1));
    }
}

void Pipeline::evaluate(Stream& stream, const TokenBatch& batch) const {
    forward(stream, batch);
    if (ends_model()) stages_.back()->evaluate_head(stream, 0, batch);
}

void Pipeline::next_token_logits(Stream& stream, int64_t row, Tensor out) const {
    if (ends_model()) stages_.back()->next_token_logits(stream, 0, row, out);
    messages_->broadcast(stream, out.as<float>(), out.numel(), ranks() - 1);
}

void Pipeline::warm_up(Stream& stream, const TokenBatch& batch, int reserved_sms) const {
    for (const Tensor& buffer : messages_->buffers()) {
        std::vector<float> values(static_cast<size_t>(buffer.numel()));
        RandomStream(0, RandomPurpose::synthetic, 2, 0)
            .fill_normal(values.data(), std::ssize(values), 1.0f);
        std::vector<bf16> rounded;
        const void* from = values.data();
        if (buffer.dtype == DType::bf16) {
            for (const float value : values) rounded.push_back(bf16(value));
            from = rounded.data();
        }
        copy_now(stream.device, buffer.data, from, buffer.bytes());
    }
    for (const int number : schedule_.stages_of(rank_)) {
        PipelineAction action{.stage = number, .slot = 0};
        const auto compute = [&](PipelineWork work, bool reads) {
            action.work = work;
            action.buffer = reads ? 0 : -1;
            stream.settings.reserved_sms = work == PipelineWork::forward ? 0 : reserved_sms;
            this->compute(stream, action, batch);
            stream.settings.reserved_sms = 0;
        };
        compute(PipelineWork::forward, !is_first(number));
        if (schedule_.halves_apart) {
            compute(PipelineWork::backward_inputs, !is_last(number));
            compute(PipelineWork::backward_weights, false);
        } else {
            compute(PipelineWork::backward, !is_last(number));
        }
    }
}

}  // namespace train_gpt
