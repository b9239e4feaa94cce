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

/// Executes the computes and messages of one rank, in the order of the rank's list. A model on one
/// rank is a pipeline of one stage, in which nothing moves. Ranks without the first stage need no
/// tokens of a micro-batch. Ranks without the last stage need no targets.
class Pipeline {
  public:
    /// A whole model, which must live longer.
    Pipeline(Stage& whole);  // NOLINT(google-explicit-constructor)
    /// `stages`: this rank's stages, in order; they must live longer. `shape` has the most
    /// micro-batches that a step can have. Takes buffers for messages from the arena.
    Pipeline(const PipelineShape& shape, int rank, std::vector<Stage*> stages, Arena& arena);

    int ranks() const { return schedule_.shape.ranks; }
    const PipelineSchedule& schedule() const { return schedule_; }
    const DecoderSpec& spec() const { return stages_.front()->spec(); }
    const StageOptions& options() const { return stages_.front()->options(); }
    ContextGroup& context() const { return stages_.front()->context(); }
    BatchShape batch_shape() const {
        return {options().B, sequence_length(), options().document_mask, context().place()};
    }
    /// The tokens that all context-parallel ranks together have of each sequence.
    int sequence_length() const { return stages_.front()->sequence_length(); }
    bool begins_model() const { return rank_ == 0; }
    bool ends_model() const { return rank_ == ranks() - 1; }
    /// This rank's last stage. If ends_model(), it is the stage that ends the model.
    const Stage& last_stage() const { return *stages_.back(); }
    /// The largest scratch memory that any kernel of the stages needs.
    size_t scratch_bytes(const Stream& stream) const;
    /// How many batches are in use at the same time, at most. A batch is in use if its micro-batch
    /// is not older than the oldest unfinished one, and not newer than the newest that has begun.
    int batches_in_use() const;

    void connect(const Device& device, Communicator& pipeline, StepClock* clock) {
        messages_->connect(device, pipeline, clock);
    }

    /// This rank's actions in a step in which no rank of the run has more than most_micro_batches
    /// micro-batches. A rank with fewer micro-batches skips the actions of micro-batches that it
    /// does not have.
    const std::vector<PipelineAction>& actions(int most_micro_batches);
    /// Executes one action. `batch`: the batch of the action's micro-batch.
    void execute(Stream& stream, const PipelineAction& action, const TokenBatch& batch) const;
    /// Skips an action of a micro-batch that only other ranks have. Takes part in what the ranks
    /// exchange in this action if they split the state.
    void skip(Stream& stream, const PipelineAction& action) const;

    /// A forward pass of one micro-batch through all stages, in their first slots.
    void forward(Stream& stream, const TokenBatch& batch) const;
    /// A forward pass as forward() does it. On ranks that end the model, also computes the loss per
    /// token (Stage::losses).
    void evaluate(Stream& stream, const TokenBatch& batch) const;
    /// Stage::next_token_logits() after forward(). All ranks get the logits.
    void next_token_logits(Stream& stream, int64_t row, Tensor out) const;
    /// Executes everything that a step executes on one micro-batch, without messages. Random
    /// numbers take the place of messages. Backward passes leave reserved_sms multiprocessors free.
    void warm_up(Stream& stream, const TokenBatch& batch, int reserved_sms) const;

  private:
    using Kind = StageMessages::Kind;
    Stage& stage(int number) const {
        return *stages_[static_cast<size_t>(schedule_.index_of(number))];
    }
    bool is_first(int stage) const { return stage == 0; }
    bool is_last(int stage) const { return stage == schedule_.stages - 1; }
    void compute(Stream& stream, const PipelineAction& action, const TokenBatch& batch,
                 bool backward_follows = true) const;

    PipelineSchedule schedule_, shorter_;  // shorter_: for a step with fewer micro-batches
    int rank_ = 0;
    std::vector<Stage*> stages_;
    std::unique_ptr<StageMessages> messages_;
};

}  // namespace train_gpt
