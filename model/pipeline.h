// The stages of a model on a pipeline rank, and the interpreter of pipeline schedules
// (parallel/pipeline/pipeline_schedule.h).
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "model/stage.h"
#include "parallel/pipeline/pipeline_schedule.h"
#include "parallel/pipeline/stage_messages.h"

namespace train_gpt {

/// Executes the computes and messages of one rank in its list's order. A model on one rank is a
/// pipeline of one stage, in which nothing moves. Of a micro-batch, ranks without the first stage
/// need no tokens, and those without the last no targets.
class Pipeline {
  public:
    /// A whole model, which must live longer.
    Pipeline(Stage& whole);  // NOLINT(google-explicit-constructor)
    /// This rank's stages, in order, which must live longer. Takes buffers for messages from the
    /// arena. `shape` has the most micro-batches of a step.
    Pipeline(const PipelineShape& shape, int rank, std::vector<Stage*> stages, Arena& arena);

    int ranks() const { return schedule_.shape.ranks; }
    const PipelineSchedule& schedule() const { return schedule_; }
    const DecoderSpec& spec() const { return stages_.front()->spec(); }
    const StageOptions& options() const { return stages_.front()->options(); }
    ContextGroup& context() const { return stages_.front()->context(); }
    BatchShape batch_shape() const {
        return {options().B, sequence_length(), options().document_mask, context().place()};
    }
    /// Of all context-parallel ranks.
    int sequence_length() const { return stages_.front()->sequence_length(); }
    bool begins_model() const { return rank_ == 0; }
    bool ends_model() const { return rank_ == ranks() - 1; }
    /// The stage that ends the model, on its rank.
    const Stage& last_stage() const { return *stages_.back(); }
    /// The largest scratch memory that any kernel of the stages needs.
    size_t scratch_bytes(const Stream& stream) const;
    /// Micro-batches from the oldest that is not finished to the newest that has begun, at most:
    /// so many batches are in use at the same time.
    int batches_in_use() const;

    void connect(const Device& device, Communicator& pipeline, StepClock* clock) {
        messages_->connect(device, pipeline, clock);
    }

    /// This rank's actions in a step of so many micro-batches, at most, on any rank of the run.
    /// Ranks with fewer leave out the actions of those that they do not have.
    const std::vector<PipelineAction>& actions(int most_micro_batches);
    /// Executes one action, whose micro-batch has the batch.
    void execute(Stream& stream, const PipelineAction& action, const TokenBatch& batch) const;
    /// Instead of an action for a micro-batch that only other ranks have: what the ranks that split the
    /// state exchange in it.
    void skip(Stream& stream, const PipelineAction& action) const;

    /// A forward pass of one micro-batch through all stages, in their first slots.
    void forward(Stream& stream, const TokenBatch& batch) const;
    /// The same, and the loss per token where last_stage() is (Stage::losses).
    void evaluate(Stream& stream, const TokenBatch& batch) const;
    /// Stage::next_token_logits() after forward(), on all ranks.
    void next_token_logits(Stream& stream, int64_t row, Tensor out) const;
    /// Executes everything that a step executes on one micro-batch, without messages, from inputs
    /// like random ones; backward passes leave so many multiprocessors free.
    void warm_up(Stream& stream, const TokenBatch& batch, int reserved_sms) const;

  private:
    using Kind = StageMessages::Kind;
    Stage& stage(int number) const { return *stages_[static_cast<size_t>(number / ranks())]; }
    bool is_first(int stage) const { return stage == 0; }
    bool is_last(int stage) const { return stage == schedule_.stages - 1; }
    void compute(Stream& stream, const PipelineAction& action, const TokenBatch& batch) const;

    PipelineSchedule schedule_, shorter_;  // shorter_: of a step with fewer micro-batches
    int rank_ = 0;
    std::vector<Stage*> stages_;
    std::unique_ptr<StageMessages> messages_;
};

}  // namespace train_gpt
