// Everything a training run holds in memory, taken from one arena in one order. Run over a counting arena it is the plan
// of the run; run over a real one it is the run.
#pragma once
#include <memory>

#include "dataloader/loader.h"
#include "kernels/adamw.h"
#include "model/generator.h"
#include "model/gpt.h"
#include "parallel/step_clock.h"
#include "training/batch_feed.h"
#include "training/config.h"
#include "training/evaluation.h"
#include "training/optimizer.h"

namespace train_gpt {

/// What the device found out in a step.
struct StepOutcome {
    StepState state;
    Optimizer::StepSums sums;  // over all ranks
};

/// Outcomes of steps on their way to the host, which may be a step ahead of the device.
class OutcomeQueue {
  public:
    explicit OutcomeQueue(Arena& arena);
    /// Enqueues the copy of a step's outcome. At most `capacity` outcomes may be on their way.
    void push(Stream& stream, const Optimizer& optimizer);
    /// Waits for the oldest.
    StepOutcome pop();

    static constexpr int capacity = 2;

  private:
    StepOutcome* outcomes_ = nullptr;  // [capacity] in host memory
    Event arrived_[capacity];
    int64_t pushed_ = 0, popped_ = 0;
};

struct Trainer {
    Trainer(const Config& config, const GPTShape& shape, DType dtype, Recompute recompute,
            Arena& arena, const Sharding& sharding);

    /// The run is to stop behind the step that comes: all ranks see it in that step's outcome.
    void request_stop() { *stop_request_ = 1; }
    /// The loader's next batch, on its way to the device.
    TokenBatch next_batch(TrainLoader& loader);
    /// One micro-batch: forward and backward, its losses added to the step's.
    void micro_batch(const TokenBatch& batch, bool first, bool last);
    /// The update behind a step's micro-batches.
    void update(const AdamWStep& args, float scale, float clip);

    /// Walks every path of a step, an evaluation and a sample once and applies nothing: libraries load their kernels and
    /// choose among them now, not within a step. The gradients that it leaves are overwritten by the first micro-batch.
    void warm_up();

    Stream stream;
    ParameterStore parameters;
    GPT model;
    Generator generator;
    Optimizer optimizer;
    BatchFeed feed;
    EvaluationBatch evaluation_batch;
    OutcomeQueue outcomes;
    StepClock clock;
    void* loader_memory = nullptr;  // TrainLoader's ring of batches

  private:
    double* stop_request_ = nullptr;  // in host memory
    int sources_;                     // of training data
};

GPTShape shape_of(const Config& config, int64_t vocab_size);

/// What of LoaderOptions follows from the configuration.
LoaderOptions loader_options(const Config& config, int64_t first_step, int rank = 0, int ranks = 1);

Sharding sharding_of(const Config& config, int rank, int ranks);

/// AdamW's constants for the update of a step, counted from 0, with its learning rate.
AdamWStep adamw_step(const Config& config, int64_t step, double rate);

}  // namespace train_gpt
