// A small GPT with its own memory on the device under test, for tests.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "device/copy.h"
#include "kernels/head_loss.h"
#include "model/generator.h"
#include "model/gpt.h"
#include "test/kernels/test_device.h"
#include "training/checkpoint.h"
#include "training/optimizer.h"

namespace train_gpt {

struct TinyModel {
    TinyModel(const GPTShape& shape, int B, int T, DType dtype,
              Recompute recompute = Recompute::none)
        : arena_(allocate(shape, B, T, dtype, recompute)) {
        build(arena_, shape, B, T, dtype, recompute);
        // Nothing may be read before it is written, in particular gradients.
        for (int i = 0; i < count(); ++i)
            set_state(ParameterStore::State::gradient, i, std::numeric_limits<float>::quiet_NaN());
    }

    int count() const { return static_cast<int>(parameters->parameters().size()); }
    const Parameter& parameter(int i) const {
        return parameters->parameters()[static_cast<size_t>(i)];
    }

    /// Forward and backward of one micro-batch; returns the sum of losses.
    double run(const int32_t* tokens, const int32_t* targets, bool first = true, bool last = true) {
        set_batch(tokens, targets);
        submit(first, last);
        double loss = 0;
        copy_now(stream.device, &loss, loss_, sizeof loss);
        return loss;
    }

    /// The following batches have documents: doc_start [B, T].
    void set_documents(const int32_t* doc_start) {
        copy_now(stream.device, doc_start_.data, doc_start, doc_start_.bytes());
        has_documents_ = true;
    }
    void set_batch(const int32_t* tokens, const int32_t* targets) {
        copy_now(stream.device, tokens_.data, tokens, tokens_.bytes());
        copy_now(stream.device, targets_.data, targets, targets_.bytes());
    }
    /// The work of run() without its copies.
    void submit(bool first = true, bool last = true) {
        const TokenBatch batch{.tokens = tokens_.as<int32_t>(),
                               .targets = targets_.as<int32_t>(),
                               .doc_start = has_documents_ ? doc_start_.as<int32_t>() : nullptr};
        parameters->begin_micro_batch(first, last);
        model->forward(stream, batch);
        model->backward(stream, batch);
        accumulate_loss(stream, loss_, model->losses(), tokens_.numel(), false);
    }

    /// Each token's loss in the last run.
    std::vector<float> losses() const {
        std::vector<float> values(static_cast<size_t>(tokens_.numel()));
        copy_now(stream.device, values.data(), model->losses(), values.size() * sizeof(float));
        return values;
    }
    std::vector<float> state(ParameterStore::State which, int i) const {
        std::vector<float> values(static_cast<size_t>(parameter(i).padded_numel()));
        parameters->read(which, i, 0, values);
        return values;
    }
    void set_state(ParameterStore::State which, int i, float value) {
        parameters->write(
            which, i, 0,
            std::vector<float>(static_cast<size_t>(parameter(i).padded_numel()), value));
    }
    std::vector<float> gradient(int i) const {
        std::vector<float> values = state(ParameterStore::State::gradient, i);
        values.resize(static_cast<size_t>(parameter(i).numel()));
        return values;
    }

    Stream stream;
    std::unique_ptr<ParameterStore> parameters;
    std::unique_ptr<GPT> model;
    std::unique_ptr<Generator> generator;
    std::unique_ptr<Optimizer> optimizer;

  private:
    Arena allocate(const GPTShape& shape, int B, int T, DType dtype, Recompute recompute) {
        Arena plan = Arena::counting(test_device());
        build(plan, shape, B, T, dtype, recompute);
        return Arena(test_device(), plan);
    }

    void build(Arena& arena, const GPTShape& shape, int B, int T, DType dtype,
               Recompute recompute) {
        optimizer.reset();
        generator.reset();
        model.reset();
        parameters = std::make_unique<ParameterStore>(arena, gpt_parameters(shape), dtype,
                                                      ParameterStore::Use::training);
        model = std::make_unique<GPT>(
            shape,
            GPTOptions{
                .B = B, .T = T, .recompute = recompute, .use = ParameterStore::Use::training},
            *parameters, arena);
        generator = std::make_unique<Generator>(shape, *parameters, arena);
        optimizer = std::make_unique<Optimizer>(*parameters, arena);
        tokens_ = arena.tensor(DType::int32, {B, T}, Purpose::buffers);
        targets_ = arena.tensor(DType::int32, {B, T}, Purpose::buffers);
        doc_start_ = arena.tensor(DType::int32, {B, T}, Purpose::buffers);
        loss_ = static_cast<double*>(arena.take(sizeof(double), Purpose::buffers));
        stream = Stream(arena.device(), arena.is_counting());
        stream.scratch_bytes =
            std::max(model->scratch_bytes(stream), generator->scratch_bytes(stream));
        stream.scratch = arena.take(stream.scratch_bytes, Purpose::workspaces);
    }

    Tensor tokens_, targets_, doc_start_;
    bool has_documents_ = false;
    double* loss_ = nullptr;
    Arena arena_;
};

}  // namespace train_gpt
