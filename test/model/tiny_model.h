// A small decoder with its own memory on the device under test, for tests.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "device/copy.h"
#include "kernels/head_loss.h"
#include "model/families/gpt2.h"
#include "model/generator.h"
#include "model/stage.h"
#include "test/kernels/test_device.h"
#include "training/files/checkpoint.h"
#include "training/optimizer.h"

namespace train_gpt {

struct TinyModel {
    TinyModel(const DecoderSpec& spec, int B, int T, DType dtype,
              Recompute recompute = Recompute::none, const Generator::Options& generating = {});
    /// A stage of a model, or a whole one with any options.
    TinyModel(const DecoderSpec& spec, const Registry& registry, const StageOptions& options,
              DType dtype, const Generator::Options& generating = {});

    int count() const { return static_cast<int>(parameters->parameters().size()); }
    const Parameter& parameter(int i) const;

    /// Forward and backward of one micro-batch of `micro_batches` in a step; returns the sum of
    /// losses. Those after the first do not begin a step.
    double run(const int32_t* tokens, const int32_t* targets, bool first = true,
               int micro_batches = 1);

    /// The following batches have documents: doc_start [B, T].
    void set_documents(const int32_t* doc_start);
    void set_batch(const int32_t* tokens, const int32_t* targets);
    TokenBatch batch() const;
    /// The work of run() without its copies.
    void submit(bool first = true, int micro_batches = 1);

    /// Each token's loss in the last run.
    std::vector<float> losses() const;
    std::vector<float> state(std::string_view which, int i) const;
    void set_state(std::string_view which, int i, float value);
    std::vector<float> gradient(int i) const;

    Stream stream;
    std::unique_ptr<ParameterStore> parameters;
    std::unique_ptr<RouterCounts> routers;
    std::unique_ptr<Stage> model;
    std::unique_ptr<Generator> generator;  // of a whole model
    std::unique_ptr<Optimizer> optimizer;

  private:
    Arena allocate(const DecoderSpec& spec, const Registry& registry, const StageOptions& options,
                   DType dtype);

    void build(Arena& arena, const DecoderSpec& spec, const Registry& registry,
               StageOptions options, DType dtype);

    Tensor tokens_, targets_, doc_start_;
    bool has_documents_ = false;
    double* loss_ = nullptr;
    Generator::Options generating_;
    Arena arena_;
};

/// ‖a − b‖ / ‖b‖ of vectors of one length; infinite if an element is not finite.
double relative_difference(const std::vector<float>& a, const std::vector<float>& b);

}  // namespace train_gpt
