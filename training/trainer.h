// Everything a training run holds in memory, taken from one arena in one order. Run over a counting arena it is the plan
// of the run; run over a real one it is the run.
#pragma once
#include <memory>

#include "dataloader/loader.h"
#include "model/generator.h"
#include "model/gpt.h"
#include "training/config.h"
#include "training/evaluation.h"
#include "training/optimizer.h"

namespace train_gpt {

struct Trainer {
    /// vocab_size: config.model.vocab_size, or the tokenizer's where that is 0.
    Trainer(const Config& config, const GPTShape& shape, DType dtype, Recompute recompute, Arena& arena);

    Stream stream;
    ParameterStore parameters;
    GPT model;
    Generator generator;
    Optimizer optimizer;
    void* loader_memory = nullptr;  // TrainLoader's ring of batches
    double* loss_sum = nullptr;     // nats, over the tokens of a step

    EvaluationBatch evaluation_batch;  // each [B, T]
};

GPTShape shape_of(const Config& config, int64_t vocab_size);

/// What of LoaderOptions follows from the configuration.
LoaderOptions loader_options(const Config& config, int64_t first_step);

}  // namespace train_gpt
