#include "training/trainer.h"

#include <algorithm>
#include <cassert>
#include <vector>

#include "kernels/copy.h"

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
    : stream(arena.device(), arena.is_counting()),
      parameters(arena, gpt_parameters(shape), dtype, ParameterStore::Use::training),
      model(shape,
            {.B = config.batch.micro_batch,
             .T = config.sequence_length(),
             .recompute = recompute,
             .use = ParameterStore::Use::training},
            parameters, arena),
      generator(shape, parameters, arena),
      optimizer(parameters, arena),
      feed(arena, config.batch.micro_batch, config.sequence_length()),
      evaluation_batch(arena, config.batch.micro_batch, config.sequence_length()),
      outcomes(arena) {
    stream.scratch_bytes = std::max(model.scratch_bytes(), generator.scratch_bytes());
    stream.scratch = arena.take(stream.scratch_bytes, Purpose::workspaces);
    loss_sum = static_cast<double*>(arena.take(sizeof(double), Purpose::workspaces));
    loader_memory = arena.take(TrainLoader::buffer_bytes(loader_options(config, 0)), Purpose::staging);
}

void Trainer::warm_up() {
    std::fill(evaluation_batch.tokens.begin(), evaluation_batch.tokens.end(), 0);
    std::fill(evaluation_batch.targets.begin(), evaluation_batch.targets.end(), 0);
    evaluation_batch.run(stream, model);
    for (const bool first : {true, false}) {
        parameters.begin_micro_batch(first, true);
        model.forward(stream, evaluation_batch.on_device());
        model.backward(stream, evaluation_batch.on_device());
    }
    const std::vector<int32_t> prompt(2, 0);
    for (const size_t n : {size_t{1}, prompt.size()}) {
        generator.reset();
        if (static_cast<int>(n) <= generator.shape().n_ctx) generator.feed(stream, std::span(prompt).first(n));
    }
    generator.reset();
    stream.synchronize();
}

OutcomeQueue::OutcomeQueue(Arena& arena)
    : outcomes_(static_cast<StepOutcome*>(arena.take(capacity * sizeof(StepOutcome), Purpose::staging))) {
    if (arena.is_counting()) return;
    for (Event& event : arrived_) event = Event(arena.device());
}

void OutcomeQueue::push(Stream& stream, const StepState* state, const double* loss_sum) {
    assert(pushed_ - popped_ < capacity);
    StepOutcome& to = outcomes_[pushed_ % capacity];
    copy(stream, &to.state, state, sizeof *state);
    copy(stream, &to.loss_sum, loss_sum, sizeof *loss_sum);
    arrived_[pushed_++ % capacity].record(stream);
}

StepOutcome OutcomeQueue::pop() {
    assert(popped_ < pushed_);
    arrived_[popped_ % capacity].wait();
    return outcomes_[popped_++ % capacity];
}

}  // namespace train_gpt
