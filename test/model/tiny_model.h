// A small GPT with its own memory, for tests.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/head_loss.h"
#include "model/generator.h"
#include "model/gpt.h"
#include "training/checkpoint.h"
#include "training/optimizer.h"

namespace train_gpt {

struct TinyModel {
    TinyModel(const GPTShape& shape, int B, int T, DType dtype, Recompute recompute = Recompute::none)
        : arena_(allocate(shape, B, T, dtype, recompute)) {
        build(arena_, shape, B, T, dtype, recompute);
        // Nothing may be read before it is written, gradients least of all.
        for (int i = 0; i < count(); ++i)
            std::fill_n(parameters->gradient(i), parameter(i).padded_numel(), std::numeric_limits<float>::quiet_NaN());
    }

    int count() const { return static_cast<int>(parameters->parameters().size()); }
    const Parameter& parameter(int i) const { return parameters->parameters()[static_cast<size_t>(i)]; }

    /// Forward and backward of one micro-batch; returns the sum of losses.
    double run(const int32_t* tokens, const int32_t* targets, bool first = true, bool last = true) {
        const TokenBatch batch{.tokens = tokens, .targets = targets};
        parameters->begin_micro_batch(first, last);
        model->forward(stream, batch);
        model->backward(stream, batch);
        double loss = 0;
        accumulate_loss(stream, &loss, model->losses(), int64_t{model->options().B} * model->options().T, false);
        return loss;
    }

    std::vector<float> gradient(int i) const {
        const float* g = parameters->gradient(i);
        return {g, g + parameter(i).numel()};
    }

    Stream stream;
    std::unique_ptr<ParameterStore> parameters;
    std::unique_ptr<GPT> model;
    std::unique_ptr<Generator> generator;
    std::unique_ptr<Optimizer> optimizer;

  private:
    Arena allocate(const GPTShape& shape, int B, int T, DType dtype, Recompute recompute) {
        Arena plan = Arena::counting(Device{});
        build(plan, shape, B, T, dtype, recompute);
        return Arena(Device{}, plan);
    }

    void build(Arena& arena, const GPTShape& shape, int B, int T, DType dtype, Recompute recompute) {
        optimizer.reset();
        generator.reset();
        model.reset();
        parameters = std::make_unique<ParameterStore>(arena, gpt_parameters(shape), dtype, ParameterStore::Use::training);
        model = std::make_unique<GPT>(
            shape, GPTOptions{.B = B, .T = T, .recompute = recompute, .use = ParameterStore::Use::training}, *parameters,
            arena);
        generator = std::make_unique<Generator>(shape, *parameters, arena);
        optimizer = std::make_unique<Optimizer>(*parameters, arena);
        stream = Stream{};
        stream.scratch_bytes = std::max(model->scratch_bytes(), generator->scratch_bytes());
        stream.scratch = arena.take(stream.scratch_bytes, Purpose::workspaces);
    }

    Arena arena_;
};

}  // namespace train_gpt
