// Everything that a training run holds in memory, taken from one arena in a fixed order. A Trainer
// over a counting arena is the plan of the run; a Trainer over a real arena is the run.
#pragma once
#include <algorithm>
#include <memory>
#include <optional>

#include "dataloader/loader.h"
#include "kernels/adamw.h"
#include "model/fp8_scales.h"
#include "model/generator.h"
#include "model/pass_generator.h"
#include "model/pipeline.h"
#include "model/router_counts.h"
#include "parallel/mesh.h"
#include "parallel/state/state_copy.h"
#include "parallel/step_clock.h"
#include "training/batch_feed.h"
#include "training/config/layout.h"
#include "training/config/step_sums.h"
#include "training/evaluation.h"
#include "training/fingerprints.h"
#include "training/optimizer.h"

namespace train_gpt {

/// What the device reports about a step.
struct StepOutcome {
    StepState state;
    StepSums sums;  // over all ranks
    RouterReport routers;
    Fp8Found fp8;
};

/// Outcomes of steps on their way to the host, which may be a step ahead of the device.
class OutcomeQueue {
  public:
    explicit OutcomeQueue(Arena& arena);
    /// Enqueues the copy of a step's outcome. At most `capacity` outcomes may be in flight.
    void push(Stream& stream, const Optimizer& optimizer, RouterCounts& routers, Fp8Scales& fp8);
    /// Waits for the oldest outcome and returns it.
    StepOutcome pop(const RouterCounts& routers, Fp8Scales& fp8);

    static constexpr int capacity = 2;

  private:
    struct Numbers {
        StepState state;
        StepSums sums;
    };
    Numbers* outcomes_ = nullptr;  // [capacity] in host memory
    Event arrived_[capacity];
    int64_t pushed_ = 0, popped_ = 0;
};

struct Trainer {
    Trainer(const RunShape& shape, Arena& arena, int rank = 0);

    /// Lets the trainer's collectives run. All ranks call it; `mesh` must live longer.
    void connect(const Mesh& mesh);
    /// What samples text: a generator with a cache, or one that computes whole forward passes if
    /// ranks share the model.
    TokenGenerator& generator() {
        if (pass_generator_) return *pass_generator_;
        return *cached_generator_;
    }

    /// What evaluates tasks with cached keys and values; null if ranks share the model.
    Generator* scorer() {
        return parameters.holds_whole_model() && cached_generator_ ? &*cached_generator_ : nullptr;
    }

    /// Requests that the run stop after the next step. All ranks see the request in the outcome of
    /// that step.
    void request_stop() { requests_[0] = 1; }
    /// What this rank adds to StepSums::save_progress in the steps that end from now on.
    void show_save_progress(int progress) { requests_[1] = progress; }
    /// Begins a step. This rank has `micro_batches` micro-batches, and no rank has more than
    /// `most`.
    void begin_step(int micro_batches, int most);
    /// What this rank does in the step, in order: forwards and backwards of micro-batches, and
    /// messages between the stages of a pipeline. Valid until the next begin_step().
    const std::vector<PipelineAction>& actions() const { return *actions_; }
    /// Whether an action is the first of one of this rank's micro-batches, which needs its batch
    /// then.
    bool begins_micro_batch(const PipelineAction& action) const;
    /// Takes the loader's next batch for a micro-batch, and submits its copy to the device.
    void load(int micro_batch, TrainLoader& loader);
    void load(int micro_batch, const TokenBatch& batch);
    const TokenBatch& batch_of(int micro_batch) const {
        return batches_[static_cast<size_t>(micro_batch) % batches_.size()];
    }
    /// Executes an action. Adds the micro-batch's losses to the step's. If only other ranks have
    /// the micro-batch, takes part in what the ranks exchange.
    void execute(const PipelineAction& action);
    /// After one of the last two spikes, counted from 1: the losses of this rank's micro-batches in
    /// it; none on ranks without losses.
    std::vector<double> losses_at_spike(int64_t spike) const;
    /// The outcome of the oldest step that has not been asked for. Waits for it.
    StepOutcome outcome() { return outcomes.pop(routers, fp8); }
    /// The update after a step's micro-batches.
    void update(const OptimizerStep& args, float scale, float clip);

    /// With exact sums, the first grids: from the gradients of the loader's first micro-batch,
    /// which is the same on all data-parallel ranks. All ranks call it; nothing is applied.
    void choose_first_grids(TrainLoader& loader);

    /// Runs every path of a step, an evaluation and a sample once, and applies nothing. So
    /// libraries load and choose their kernels now, and not during a step. Kernels are timed on
    /// what a model with random weights computes from random tokens: zeros or constants take less
    /// power and therefore less time. The weights must be set after warm_up(). The first
    /// micro-batch overwrites the gradients that warm_up() leaves.
    void warm_up();

    Stream stream;
    RankRegistry registry;
    TensorGroup tensor;
    ContextGroup context;
    ParameterStore parameters;
    RouterCounts routers;
    Fp8Scales fp8;
    std::vector<std::unique_ptr<Stage>> stages;
    Pipeline model;  // executes the stages
    Optimizer optimizer;
    Fingerprints fingerprints;
    BatchFeed feed;
    EvaluationBatch evaluation_batch;
    OutcomeQueue outcomes;
    StepClock clock;
    /// Present if checkpoints are written in the background (Config::saves_in_background).
    std::optional<StateCopy> state_copy;
    /// What it copies beside the masters and slots: StateCopy::other().
    enum SavedBeside : size_t { saved_spikes, saved_router_counts, saved_grids, saved_fp8 };
    void* loader_memory = nullptr;  // TrainLoader's ring of batches

  private:
    /// This rank's sums, in the device's memory.
    StepSums* sums() { return reinterpret_cast<StepSums*>(optimizer.sums_of_rank()); }

    void add_losses(const TokenBatch& batch, int micro_batch);
    int micro_batches_with_losses() const { return std::min(micro_batches_, kept_micro_batches); }

    std::optional<Generator> cached_generator_;
    std::optional<PassGenerator> pass_generator_;
    double* requests_ = nullptr;  // in host memory: for stop_requests and save_progress
    /// A rank's micro-batches of a step whose losses are kept at a spike: the first ones.
    static constexpr int kept_micro_batches = 4096;
    // The sum of the losses of each micro-batch; and [2] the same at the last two spikes.
    double *losses_ = nullptr, *kept_losses_ = nullptr;
    bool counts_losses_;               // of the ranks that compute the same losses, the first one
    int sources_;                      // of training data
    int reserved_sms_;                 // by products while ranks exchange gradients
    std::vector<TokenBatch> batches_;  // that are in use
    const std::vector<PipelineAction>* actions_ = nullptr;
    int first_micro_batch_ = 0;  // of this rank, among the micro-batches of all ranks
    int micro_batches_ = 0;      // of this rank in the step
};

}  // namespace train_gpt
