#include "training/trainer.h"

#include <algorithm>

namespace train_gpt {

GPTShape shape_of(const Config& config, int64_t vocab_size) {
    const auto& m = config.model;
    return {.n_layer = m.n_layer,
            .n_head = m.n_head,
            .n_embd = m.n_embd,
            .n_ctx = m.n_ctx,
            .vocab_size = vocab_size};
}

LoaderOptions loader_options(const Config& config, int64_t first_step) {
    return {.seed = config.seed,
            .B = config.batch.micro_batch,
            .T = config.sequence_length(),
            .first_step = first_step,
            .micro_batches_per_step = static_cast<int>(config.micro_batches_per_step()),
            .end_of_text = {}};
}

Trainer::Trainer(const Config& config, const GPTShape& shape, DType dtype, Recompute recompute, Arena& arena)
    : stream{.device = arena.device()},
      parameters(arena, gpt_parameters(shape), dtype, ParameterStore::Use::training),
      model(shape,
            {.B = config.batch.micro_batch,
             .T = config.sequence_length(),
             .recompute = recompute,
             .use = ParameterStore::Use::training},
            parameters, arena),
      generator(shape, parameters, arena),
      optimizer(parameters, arena) {
    stream.scratch_bytes = std::max(model.scratch_bytes(), generator.scratch_bytes());
    stream.scratch = arena.take(stream.scratch_bytes, Purpose::workspaces);
    loss_sum = static_cast<double*>(arena.take(sizeof(double), Purpose::workspaces));
    loader_memory = arena.take(TrainLoader::buffer_bytes(loader_options(config, 0)), Purpose::staging);
    const size_t batch_tokens = static_cast<size_t>(config.batch.micro_batch) *
                                static_cast<size_t>(config.sequence_length());
    evaluation_batch.tokens = static_cast<int32_t*>(arena.take(batch_tokens * sizeof(int32_t), Purpose::staging));
    evaluation_batch.targets = static_cast<int32_t*>(arena.take(batch_tokens * sizeof(int32_t), Purpose::staging));
}

}  // namespace train_gpt
