// What models other than GPT-2 on one device ask of a Stage: other specs, cut models, several
// micro-batches at once, and a backward pass in two halves.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "model/families/family.h"
#include "test/catch.h"
#include "test/model/random_spec.h"
#include "test/model/reference_decoder.h"
#include "test/model/tiny_model.h"
#include "test/random.h"

using namespace train_gpt;

namespace {

struct Batch {
    std::vector<int32_t> tokens, targets;

    Batch(const DecoderSpec& spec, int n) {
        for (int i = 0; i < n; ++i) {
            tokens.push_back(static_cast<int32_t>(random_int(0, spec.vocab_size - 1)));
            targets.push_back(static_cast<int32_t>(random_int(-1, spec.vocab_size - 1)));
        }
        targets[0] = std::max(targets[0], 0);
    }
};

/// A model, by its spec and seed, and the micro-batches of a step.
struct MicroBatches {
    static constexpr int B = 1, n = 3;

    DecoderSpec spec = random_spec();
    uint64_t seed = test_rng()();
    std::vector<Batch> batches;

    MicroBatches() {
        const int T = static_cast<int>(random_int(3, 7));
        for (int i = 0; i < n; ++i) batches.emplace_back(spec, B * T);
    }
    int T() const { return static_cast<int>(batches[0].tokens.size()) / B; }
};

/// Weights of the size that training reaches, so that no part of a model is negligible.
std::vector<std::vector<float>> random_weights(TinyModel& m) {
    std::vector<std::vector<float>> values;
    for (int i = 0; i < m.count(); ++i) {
        values.push_back(random_normal(static_cast<size_t>(m.parameter(i).numel()), 0.3f));
        for (float& value : values.back()) value += m.parameter(i).init_mean;
        m.parameters->state.set(i, values.back());
    }
    m.parameters->state.clear_padding();
    return values;
}

Tensor matrix(const TestMemory& memory, DType dtype, int64_t rows, int64_t cols) {
    return {memory.data(), dtype, {rows, cols}};
}

const Recompute levels[] = {Recompute::none, Recompute::elementwise, Recompute::block};

}  // namespace

TEST_CASE(
    "a decoder with grouped heads, no biases, positions or tied head has its loss and gradients",
    "[model][cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < (device_is_simulated() ? 2 : 6); ++repeat) {
        DecoderSpec spec = random_spec();
        if (spec.experts) spec.experts.capacity = random_capacity();
        const int B = 2, T = static_cast<int>(random_int(3, 7));
        CAPTURE(described(spec), T);
        const Batch batch(spec, B * T);
        const RouterLosses losses{
            .balance = random_int(0, 1) ? 0.3f : 0,
            .level = std::array{BalanceLevel::sequence, BalanceLevel::micro_batch,
                                BalanceLevel::step}[static_cast<size_t>(random_int(0, 2))],
            .z_loss = random_int(0, 1) ? 0.1f : 0};
        CAPTURE(losses.balance, static_cast<int>(losses.level), losses.z_loss);
        TinyModel m(spec, registry_of(spec),
                    {.B = B,
                     .T = T,
                     .recompute = levels[static_cast<size_t>(random_int(0, 2))],
                     .router_losses = losses},
                    DType::fp32);
        std::vector<std::vector<double>> values;
        for (const std::vector<float>& v : random_weights(m))
            values.emplace_back(v.begin(), v.end());
        ReferenceDecoder reference(spec, registry_of(spec), values);

        const double loss = m.run(batch.tokens.data(), batch.targets.data());
        const double expected = reference.loss(batch.tokens, batch.targets, T);
        CHECK(loss == Approx(expected).epsilon(1e-5));
        for (int64_t r = 0; r < m.routers->routers(); ++r) {
            const Tensor chosen = m.routers->chosen(static_cast<int>(r));
            std::vector<int32_t> counts(static_cast<size_t>(chosen.numel()));
            copy_now(m.stream.device, counts.data(), chosen.data, chosen.bytes());
            for (size_t e = 0; e < counts.size(); ++e)
                CHECK(counts[e] == reference.counts()[static_cast<size_t>(r) * counts.size() + e]);
        }
        const double E = std::max(1, spec.experts.n_expert);
        reference.set_router_losses(
            losses, std::vector<double>(static_cast<size_t>(spec.n_layer * E), 1 / E));
        reference.keep_choices();
        reference.loss(batch.tokens, batch.targets, T);

        // A gradient can be all rounding of terms that cancel: one expert's weight, if its sum is
        // 1.
        double of_all = 0;  // the largest norm of a tensor's gradient
        for (int i = 0; i < m.count(); ++i) {
            double square = 0;
            for (const float g : m.gradient(i)) square += double{g} * g;
            of_all = std::max(of_all, std::sqrt(square));
        }
        // Along a random direction of each tensor, the gradient is the slope of the loss.
        for (int i = 0; i < m.count(); ++i) {
            const std::vector<float> gradient = m.gradient(i),
                                     direction = random_normal(gradient.size());
            double slope = 0, square = 0;
            for (size_t k = 0; k < gradient.size(); ++k) {
                slope += double{gradient[k]} * direction[k];
                square += double{gradient[k]} * gradient[k];
            }
            const auto loss_at = [&](double step) {
                for (size_t k = 0; k < direction.size(); ++k)
                    reference.values(i)[k] =
                        values[static_cast<size_t>(i)][k] + step * direction[k];
                return reference.loss(batch.tokens, batch.targets, T);
            };
            const auto slope_now = [&] {
                const double step = 1e-6;
                return (loss_at(step) - loss_at(-step)) / (2 * step);
            };
            const double difference = slope_now(), error = std::abs(slope - difference);
            double bound = 1e-4 * (std::sqrt(square) + 1e-3) + 0x1p-22 * (expected + of_all);
            // Some models amplify roundings a thousandfold, such as a norm of a small vector. What
            // roundings of the weights alone do to the slope shows how much.
            double by_roundings = 0;
            const std::vector<std::vector<double>> exact = values;
            for (int trial = 0; trial < 3 && error > bound; ++trial) {
                for (size_t j = 0; j < values.size(); ++j) {
                    const std::vector<float> normal = random_normal(values[j].size());
                    for (size_t k = 0; k < normal.size(); ++k)
                        values[j][k] = exact[j][k] * (1 + 0x1p-24 * normal[k]);
                    reference.values(static_cast<int>(j)) = values[j];
                }
                by_roundings = std::max(by_roundings, std::abs(slope_now() - difference));
            }
            for (size_t j = 0; by_roundings > 0 && j < exact.size(); ++j)
                reference.values(static_cast<int>(j)) = values[j] = exact[j];
            loss_at(0);
            bound += 8 * by_roundings;
            CAPTURE(m.parameter(i).name, slope, difference, by_roundings);
            CHECK(error <= bound);
        }

        // The cache of the generator is grouped as well.
        for (int t = 0; t < T; ++t)
            m.generator->feed(m.stream, {&batch.tokens[static_cast<size_t>(t)], 1});
        const std::vector<float> one_by_one(m.generator->logits().begin(),
                                            m.generator->logits().end());
        m.generator->reset();
        m.generator->feed(m.stream, {batch.tokens.data(), static_cast<size_t>(T)});
        CHECK(relative_difference({m.generator->logits().begin(), m.generator->logits().end()},
                                  one_by_one) < 1e-5);
    }
}

TEST_CASE("stages of a model compute what the whole one does", "[model][cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        DecoderSpec spec = random_spec(2);
        spec.tied_head = dtype == DType::fp32;
        if (spec.experts) spec.experts.capacity = random_capacity();
        const Registry whole_registry = registry_of(spec);
        const int B = 2, T = static_cast<int>(random_int(3, 7)),
                  cut = static_cast<int>(random_int(1, spec.n_layer - 1));
        CAPTURE(described(spec), name_of(dtype), T, cut);
        const Batch batch(spec, B * T);
        const uint64_t seed = test_rng()();
        TinyModel whole(spec, B, T, dtype);
        whole.parameters->state.initialize(seed);
        whole.run(batch.tokens.data(), batch.targets.data());

        const StageOptions options{.B = B, .T = T};
        TinyModel first(spec, stage_of(whole_registry, 0, cut), options, dtype),
            last(spec, stage_of(whole_registry, cut, spec.n_layer), options, dtype);
        for (TinyModel* stage : {&first, &last}) {
            stage->parameters->state.initialize(seed);
            stage->parameters->gradients.begin_step(1, 1);
            stage->set_batch(batch.tokens.data(), batch.targets.data());
        }
        const int64_t M = B * T, C = spec.n_embd;
        const TestMemory x(static_cast<size_t>(M * C) * size_of(dtype)),
            dx(static_cast<size_t>(M * C) * size_of(dtype));
        first.model->forward(first.stream, 0, first.batch(), {}, matrix(x, dtype, M, C));
        first.stream.synchronize();
        last.model->forward(last.stream, 0, last.batch(), matrix(x, dtype, M, C));
        last.model->backward(last.stream, 0, last.batch(), {}, matrix(dx, dtype, M, C));
        last.stream.synchronize();
        first.model->backward(first.stream, 0, first.batch(), matrix(dx, dtype, M, C));
        first.stream.synchronize();

        CHECK(last.losses() == whole.losses());
        std::vector<float> sum_of_tied;
        for (TinyModel* stage : {&first, &last})
            for (int i = 0; i < stage->count(); ++i) {
                const Parameter& p = stage->parameter(i);
                const std::vector<float> gradient = stage->gradient(i),
                                         expected =
                                             whole.gradient(whole.parameters->index_of(p.name));
                CAPTURE(p.name);
                if (p.name != whole.parameter(whole_registry.head).name) {
                    CHECK(gradient == expected);
                } else if (sum_of_tied.empty()) {
                    sum_of_tied = gradient;
                    if (!spec.tied_head) CHECK(gradient == expected);
                } else {
                    for (size_t k = 0; k < gradient.size(); ++k) sum_of_tied[k] += gradient[k];
                    CHECK(relative_difference(sum_of_tied, expected) < 1e-5);
                    CHECK(p.tied_to == p.name);
                }
            }

        // The norm counts a tied tensor where the original is.
        double squares = 0;
        for (int i = 0; i < last.count(); ++i)
            if (last.parameter(i).tied_to.empty())
                for (const float g : last.gradient(i)) squares += double{g} * g;
        last.optimizer->update(last.stream, {.adamw = {.beta1 = 0.9f, .beta2 = 0.9f, .epsilon = 1}},
                               1, 0);
        CHECK(last.optimizer->state().norm == Approx(std::sqrt(squares)).epsilon(1e-5));
    }
}

TEST_CASE("activations of micro-batches are kept apart in slots, whatever their order",
          "[model][cuda]") {
    ON_EACH_DEVICE();
    const MicroBatches step;
    const auto& [spec, seed, batches] = step;
    const int B = MicroBatches::B, T = step.T(), n = MicroBatches::n;
    for (const Recompute level : levels) {
        CAPTURE(described(spec), name_of(level), T);
        std::vector<int> order(n);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), test_rng());
        TinyModel one(spec, B, T, DType::fp32, level),
            several(spec, registry_of(spec), {.B = B, .T = T, .slots = n, .recompute = level},
                    DType::fp32);
        for (TinyModel* m : {&one, &several}) m->parameters->state.initialize(seed);
        for (int i = 0; i < n; ++i) {
            const Batch& batch = batches[static_cast<size_t>(order[static_cast<size_t>(i)])];
            one.run(batch.tokens.data(), batch.targets.data(), i == 0, n);
        }

        several.parameters->gradients.begin_step(n, n);
        const auto show = [&](int i) {
            const Batch& batch = batches[static_cast<size_t>(i)];
            several.stream.synchronize();
            several.set_batch(batch.tokens.data(), batch.targets.data());
        };
        for (int i = 0; i < n; ++i) {
            show(i);
            several.model->forward(several.stream, i, several.batch());
        }
        for (const int i : order) {
            show(i);
            several.model->backward(several.stream, i, several.batch());
        }
        several.stream.synchronize();
        for (int i = 0; i < one.count(); ++i) {
            CAPTURE(one.parameter(i).name);
            CHECK(one.gradient(i) == several.gradient(i));
        }
    }
}

TEST_CASE("the halves of the backward pass give the same gradients apart, in any order",
          "[model][cuda]") {
    ON_EACH_DEVICE();
    const MicroBatches step;
    const auto& [spec, seed, batches] = step;
    const int B = MicroBatches::B, T = step.T(), n = MicroBatches::n;
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const Recompute level : levels) {
            // In the order of micro-batches, inputs then weights, the bits are those of whole
            // passes. The halves in any order give other sums of the same numbers.
            for (const bool shuffled : {false, true}) {
                CAPTURE(described(spec), name_of(dtype), name_of(level), T, shuffled);
                TinyModel whole(spec, B, T, dtype, level),
                    halves(spec, registry_of(spec),
                           {.B = B, .T = T, .slots = n, .recompute = level, .backward_apart = true},
                           dtype);
                for (TinyModel* m : {&whole, &halves}) m->parameters->state.initialize(seed);
                for (int i = 0; i < n; ++i)
                    whole.run(batches[static_cast<size_t>(i)].tokens.data(),
                              batches[static_cast<size_t>(i)].targets.data(), i == 0, n);

                // 0 … n − 1: inputs; n … 2n − 1: weights, later than the inputs of the same
                std::vector<int> order(2 * n);
                std::iota(order.begin(), order.end(), 0);
                if (shuffled) std::shuffle(order.begin(), order.end(), test_rng());
                for (int i = 0; i < n; ++i) {
                    const auto a = std::find(order.begin(), order.end(), i),
                               b = std::find(order.begin(), order.end(), n + i);
                    if (b < a) std::iter_swap(a, b);
                }
                halves.parameters->gradients.begin_step(n, n);
                const auto show = [&](int i) {
                    halves.stream.synchronize();
                    halves.set_batch(batches[static_cast<size_t>(i)].tokens.data(),
                                     batches[static_cast<size_t>(i)].targets.data());
                };
                for (int i = 0; i < n; ++i) {
                    show(i);
                    halves.model->forward(halves.stream, i, halves.batch());
                }
                for (const int action : order) {
                    show(action % n);
                    if (action < n)
                        halves.model->backward_inputs(halves.stream, action, halves.batch());
                    else
                        halves.model->backward_weights(halves.stream, action - n, halves.batch());
                }
                halves.stream.synchronize();
                for (int i = 0; i < whole.count(); ++i) {
                    const std::vector<float> ours = halves.gradient(i),
                                             expected = whole.gradient(i);
                    CAPTURE(whole.parameter(i).name);
                    // A tied head's gradient comes with the inputs of all micro-batches, before
                    // those of the embedding.
                    const bool tied = spec.tied_head && i == registry_of(spec).head;
                    if (shuffled || tied)
                        CHECK(relative_difference(ours, expected) < 1e-5);
                    else
                        CHECK(ours == expected);
                }
            }
        }
}
