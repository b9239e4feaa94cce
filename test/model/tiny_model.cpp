#include "test/model/tiny_model.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "device/copy.h"
#include "kernels/head_loss.h"
#include "model/families/gpt2.h"
#include "test/kernels/test_device.h"

namespace train_gpt {

TinyModel::TinyModel(const DecoderSpec& spec, int B, int T, DType dtype, Recompute recompute,
                     const Generator::Options& generating)
    : TinyModel(spec, registry_of(spec), {.B = B, .T = T, .recompute = recompute}, dtype,
                generating) {}

TinyModel::TinyModel(const DecoderSpec& spec, const Registry& registry, const StageOptions& options,
                     DType dtype, const Generator::Options& generating)
    : generating_(generating), arena_(allocate(spec, registry, options, dtype)) {
    build(arena_, spec, registry, options, dtype);
    // Nothing may be read before it is written, in particular gradients.
    for (int i = 0; i < count(); ++i)
        set_state(ParameterState::gradient, i, std::numeric_limits<float>::quiet_NaN());
}

const Parameter& TinyModel::parameter(int i) const {
    return parameters->parameters()[static_cast<size_t>(i)];
}

double TinyModel::run(const int32_t* tokens, const int32_t* targets, bool first,
                      int micro_batches) {
    set_batch(tokens, targets);
    submit(first, micro_batches);
    double loss = 0;
    copy_now(stream.device, &loss, loss_, sizeof loss);
    return loss;
}

void TinyModel::set_documents(const int32_t* doc_start) {
    copy_now(stream.device, doc_start_.data, doc_start, doc_start_.bytes());
    has_documents_ = true;
}

void TinyModel::set_batch(const int32_t* tokens, const int32_t* targets) {
    copy_now(stream.device, tokens_.data, tokens, tokens_.bytes());
    copy_now(stream.device, targets_.data, targets, targets_.bytes());
}

TokenBatch TinyModel::batch() const {
    return {.tokens = tokens_.as<int32_t>(),
            .targets = targets_.as<int32_t>(),
            .doc_start = has_documents_ ? doc_start_.as<int32_t>() : nullptr,
            .trains = true};
}

void TinyModel::submit(bool first, int micro_batches) {
    if (first) {
        parameters->gradients.begin_step(micro_batches, micro_batches);
        routers->begin_step(stream);
    }
    model->forward(stream, 0, batch());
    model->backward(stream, 0, batch());
    accumulate_loss(stream, loss_, model->losses(), tokens_.numel(), false);
}

std::vector<float> TinyModel::losses() const {
    std::vector<float> values(static_cast<size_t>(tokens_.numel()));
    copy_now(stream.device, values.data(), model->losses(), values.size() * sizeof(float));
    return values;
}

std::vector<float> TinyModel::state(std::string_view which, int i) const {
    std::vector<float> values(static_cast<size_t>(parameter(i).padded_numel()));
    parameters->state.read(which, i, 0, values);
    return values;
}

void TinyModel::set_state(std::string_view which, int i, float value) {
    parameters->state.write(
        which, i, 0, std::vector<float>(static_cast<size_t>(parameter(i).padded_numel()), value));
}

std::vector<float> TinyModel::gradient(int i) const {
    std::vector<float> values = state(ParameterState::gradient, i);
    values.resize(static_cast<size_t>(parameter(i).numel()));
    return values;
}

Arena TinyModel::allocate(const DecoderSpec& spec, const Registry& registry,
                          const StageOptions& options, DType dtype) {
    Arena plan = Arena::counting(test_device());
    build(plan, spec, registry, options, dtype);
    return Arena(test_device(), plan);
}

void TinyModel::build(Arena& arena, const DecoderSpec& spec, const Registry& registry,
                      StageOptions options, DType dtype) {
    optimizer.reset();
    generator.reset();
    model.reset();
    const int B = options.B, T = options.T;
    parameters = std::make_unique<ParameterStore>(
        arena, registry.parameters,
        ParameterStoreOptions{.dtype = dtype, .slots = optimizer_slots()});
    routers = std::make_unique<RouterCounts>(spec, 16, true, arena);
    options.routers = routers.get();
    model = std::make_unique<Stage>(spec, registry, options, *parameters, arena);
    if (registry.begins_model() && registry.ends_model())
        generator = std::make_unique<Generator>(spec, registry, *parameters, arena, generating_);
    optimizer =
        std::make_unique<Optimizer>(*parameters, arena, OptimizerOptions{.routers = routers.get()});
    tokens_ = arena.tensor(DType::int32, {B, T}, Purpose::buffers);
    targets_ = arena.tensor(DType::int32, {B, T}, Purpose::buffers);
    doc_start_ = arena.tensor(DType::int32, {B, T}, Purpose::buffers);
    loss_ = static_cast<double*>(arena.take(sizeof(double), Purpose::buffers));
    stream = Stream(arena.device(), arena.is_counting());
    stream.scratch_bytes = std::max(model->scratch_bytes(stream),
                                    generator ? generator->scratch_bytes(stream) : size_t{0});
    stream.scratch = arena.take(stream.scratch_bytes, Purpose::workspaces);
}

double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
    REQUIRE(a.size() == b.size());
    double square = 0, norm = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        square += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
        norm += double{b[i]} * b[i];
    }
    if (!std::isfinite(square)) return INFINITY;
    return std::sqrt(square / std::max(norm, 1e-300));
}

}  // namespace train_gpt
