// A layer's mixture of experts on its own: the router's gradient is the slope of what the layer
// computes, halves of experts add up to whole ones, and many experts for few tokens.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "kernels/experts/route.h"
#include "model/families/llama.h"
#include "test/catch.h"
#include "test/compare/operations.h"
#include "test/kernels/experts_reference.h"
#include "test/model/random_spec.h"
#include "test/model/reference_decoder.h"
#include "test/model/tiny_model.h"
#include "test/random.h"

using namespace train_gpt;

namespace {

using Floats = std::vector<float>;

DecoderSettings settings_of_layer() {
    return {.n_layer = 3,
            .n_head = 2,
            .n_embd = 8 * random_int(2, 4),
            .n_ctx = 64,
            .vocab_size = 60,
            .n_ff = 16,
            .norm_epsilon = 1e-6};
}

/// The layer in the middle of a model with three, whose attention adds nothing:
/// out = x + experts(norm(x)), of one sequence of M tokens.
class LoneLayer {
  public:
    LoneLayer(const DecoderSpec& spec, int M, const RouterLosses& losses = {})
        : model_(spec, stage_of(registry_of(spec), 1, 2), {.B = 1, .T = M, .router_losses = losses},
                 DType::fp32),
          shape_{M, spec.n_embd},
          parameters_(stage_of(registry_of(spec), 1, 2).blocks[0]) {
        for (SharedArray<float>* array : {&x_, &out_, &dout_, &dx_})
            *array = SharedArray<float>(static_cast<size_t>(M * spec.n_embd));
        for (int i = 0; i < model_.count(); ++i) {
            const Parameter& p = model_.parameter(i);
            Floats values = random_normal(static_cast<size_t>(p.numel()), 0.3f);
            for (float& value : values)
                value = i == parameters_.out_w ? 0 : on_grid(value + p.init_mean);
            set(i, values);
        }
    }

    /// A multiple of 2⁻¹⁸, of which sums and differences are exact.
    static float on_grid(float value) { return std::ldexp(std::round(std::ldexp(value, 18)), -18); }

    const BlockParameters& parameters() const { return parameters_; }
    std::string name_of(int i) const { return model_.parameter(i).name; }
    void set(int i, const Floats& values) { model_.parameters->state.set(i, values); }
    Floats weights(int i) const {
        Floats values = model_.state(ParameterState::master, i);
        values.resize(static_cast<size_t>(model_.parameter(i).numel()));
        return values;
    }
    Floats gradient(int i) const { return model_.gradient(i); }

    Floats forward(const Floats& x) {
        std::ranges::copy(x, x_.values().begin());
        model_.parameters->gradients.begin_step(1, 1);
        model_.routers->begin_step(model_.stream);
        model_.model->forward(model_.stream, 0, model_.batch(), tensor(x_), tensor(out_));
        model_.stream.synchronize();
        return {out_.values().begin(), out_.values().end()};
    }
    /// After forward(): the gradient of x.
    Floats backward(const Floats& dout) {
        std::ranges::copy(dout, dout_.values().begin());
        model_.model->backward(model_.stream, 0, model_.batch(), tensor(dout_), tensor(dx_));
        model_.stream.synchronize();
        return {dx_.values().begin(), dx_.values().end()};
    }
    std::vector<int32_t> counts() const {
        const Tensor chosen = model_.routers->chosen(1);
        std::vector<int32_t> counts(static_cast<size_t>(chosen.numel()));
        copy_now(model_.stream.device, counts.data(), chosen.data, chosen.bytes());
        return counts;
    }

  private:
    Tensor tensor(const SharedArray<float>& array) const {
        return {array.data(), DType::fp32, {shape_[0], shape_[1]}};
    }

    TinyModel model_;
    std::array<int64_t, 2> shape_;
    BlockParameters parameters_;
    SharedArray<float> x_{1}, out_{1}, dout_{1}, dx_{1};
};

/// The values by which a token's experts are chosen, from its row.
Values values_of_choice(const LoneLayer& layer, const DecoderSpec& spec, const float* x) {
    const ExpertSpec& e = spec.experts;
    const BlockParameters& p = layer.parameters();
    const Floats norm = layer.weights(p.norm2_w), w = layer.weights(p.router_w);
    const size_t C = norm.size();
    double squares = 0;
    for (size_t c = 0; c < C; ++c) squares += double{x[c]} * x[c] / static_cast<double>(C);
    Values z;
    for (size_t i = 0; i < static_cast<size_t>(e.n_expert); ++i) {
        z.push_back(e.router_bias ? layer.weights(p.router_b)[i] : 0.0);
        for (size_t c = 0; c < C; ++c)
            z.back() +=
                double{w[i * C + c]} * norm[c] * x[c] / std::sqrt(squares + spec.norm_epsilon);
    }
    if (!e.selection_bias) return z;
    const RouterScores<double> scores(z.data(), e.n_expert, e.rule.score);
    for (size_t i = 0; i < z.size(); ++i)
        z[i] = scores.scores[i] + layer.weights(p.selection_bias)[i];
    return z;
}

/// How much more than the next one the last of the k best is, and who these are.
std::pair<double, std::vector<size_t>> best_of(const Values& values, int k) {
    std::vector<size_t> order(values.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::sort(order, [&](size_t a, size_t b) { return values[a] > values[b]; });
    const auto last = static_cast<size_t>(k) - 1;
    const double margin = values[order[last]] - values[order[last + 1]];
    order.resize(last + 1);
    return {margin, order};
}

/// The rows of tokens, and how often experts are chosen by them.
struct Routed {
    Floats x;
    std::vector<int32_t> counts;
};

/// Random tokens that go to the same experts while no logit moves by more than 0.4·margin; none if
/// they are not found soon, as where selection biases are nearly equal.
std::optional<Routed> tokens_with_margin(const LoneLayer& layer, const DecoderSpec& spec, int M,
                                         double margin) {
    Routed routed;
    routed.counts.resize(static_cast<size_t>(spec.experts.n_expert));
    // A score is at most half as steep as the logits.
    if (spec.experts.selection_bias) margin /= 2;
    for (int t = 0, draws = 0; t < M; ++draws) {
        if (draws > 100 * M) return {};
        const Floats row = random_normal(static_cast<size_t>(spec.n_embd));
        const auto [more, chosen] =
            best_of(values_of_choice(layer, spec, row.data()), spec.experts.n_expert_per_token);
        if (more < margin) continue;
        routed.x.insert(routed.x.end(), row.begin(), row.end());
        for (const size_t e : chosen) ++routed.counts[e];
        ++t;
    }
    return routed;
}

/// A random direction of a parameter of the router or gate: its logits of the tokens x move by 1 at
/// most. Multiples of 2⁻¹².
Floats direction_of(const LoneLayer& layer, int parameter, const Floats& x) {
    const BlockParameters& p = layer.parameters();
    const Floats norm = layer.weights(p.norm2_w);
    const size_t C = norm.size();
    Floats direction = random_normal(layer.weights(parameter).size());
    double farthest = 0;
    if (parameter == p.router_b)
        for (const float d : direction) farthest = std::max(farthest, double{std::abs(d)});
    for (size_t row = 0; row < x.size() && parameter != p.router_b; row += C) {
        double squares = 0;
        for (size_t c = 0; c < C; ++c) squares += double{x[row + c]} * x[row + c];
        for (size_t i = 0; i < direction.size(); i += C) {
            double moves = 0;
            for (size_t c = 0; c < C; ++c)
                moves += double{direction[i + c]} * norm[c] * x[row + c] /
                         std::sqrt(squares / static_cast<double>(C));
            farthest = std::max(farthest, std::abs(moves));
        }
    }
    for (float& d : direction)
        d = std::ldexp(std::round(std::ldexp(d / static_cast<float>(farthest), 12)), -12);
    return direction;
}

double norm_of(const Floats& values) {
    double squares = 0;
    for (const float x : values) squares += double{x} * x;
    return std::sqrt(squares);
}

}  // namespace

TEST_CASE("the gradient of a router is the slope of what its layer computes", "[model][cuda]") {
    ON_EACH_DEVICE();
    // Logits move by at most two steps. A step of 1/16 has few roundings and a small error of the
    // difference quotient.
    constexpr double step = 0x1p-4;
    for (const RouterScore score : {RouterScore::softmax, RouterScore::sigmoid})
        for (const bool normalise : {false, true}) {
            DecoderSettings settings = settings_of_layer();
            settings.router = score, settings.router_normalise = normalise;
            settings.router_scale = random_int(0, 1) ? 0.5 : 2.5;
            settings.router_bias = true;
            settings.n_expert = random_int(4, 8);
            settings.n_expert_per_token = random_int(2, settings.n_expert - 1);
            settings.n_ff_expert = random_int(3, 20);
            settings.selection_bias = random_int(0, 1) == 0;
            settings.n_ff_shared = random_int(3, 20), settings.shared_gate = true;
            settings.expert_capacity = random_capacity();
            const DecoderSpec spec = llama.spec(settings);
            const int M = device_is_simulated() ? 8 : 24, k = spec.experts.n_expert_per_token;
            LoneLayer layer(spec, M);
            const BlockParameters& p = layer.parameters();
            const auto C = static_cast<size_t>(spec.n_embd);
            CAPTURE(described(spec), M, normalise, spec.experts.rule.scale);

            std::optional<Routed> routed;
            while (!(routed = tokens_with_margin(layer, spec, M, 5 * step)))
                layer.set(p.selection_bias,
                          random_normal(static_cast<size_t>(spec.experts.n_expert)));
            const auto& [x, counts] = *routed;

            const Floats dout = random_normal(x.size()), out = layer.forward(x);
            layer.backward(dout);
            double squares = 0, sizes = 0;  // of the terms of the loss, dout·(out − x)
            for (size_t i = 0; i < x.size(); ++i) {
                squares += std::pow(double{dout[i]} * (std::abs(out[i]) + std::abs(x[i])), 2);
                sizes += std::abs(dout[i] * (out[i] - x[i]));
            }
            const compare::Accuracy accuracy{
                .roundings = 16,
                .terms = static_cast<int64_t>(C) + 3 * int64_t{spec.experts.n_ff} + k};
            const double relative = accuracy.bound(DType::fp32);
            for (const int parameter : {p.router_w, p.router_b, p.shared_gate_w}) {
                const Floats weights = layer.weights(parameter),
                             gradient = layer.gradient(parameter);
                const Floats direction = direction_of(layer, parameter, x);
                const auto loss_at = [&](double at) {
                    Floats moved = weights;
                    for (size_t i = 0; i < moved.size(); ++i)
                        moved[i] += static_cast<float>(at) * direction[i];
                    layer.set(parameter, moved);
                    const Floats result = layer.forward(x);
                    CHECK(layer.counts() == counts);
                    double loss = 0;
                    for (size_t i = 0; i < x.size(); ++i)
                        loss += double{dout[i]} * (double{result[i]} - x[i]);
                    return loss;
                };
                const double near = (loss_at(step) - loss_at(-step)) / (2 * step),
                             far = (loss_at(2 * step) - loss_at(-2 * step)) / (4 * step),
                             slope = (4 * near - far) / 3;  // but for terms in step⁴
                layer.set(parameter, weights);
                double expected = 0;
                for (size_t i = 0; i < gradient.size(); ++i)
                    expected += double{gradient[i]} * direction[i];
                // Each loss is rounded; 8·J is about what the fifth derivative can be where a logit
                // moves by 1; and the gradient is rounded.
                const double of_losses = 1.5 * relative * std::sqrt(squares) / step,
                             of_step = 8 * std::pow(step, 4) / 30 * sizes,
                             of_gradient = relative * norm_of(gradient) * norm_of(direction);
                CAPTURE(layer.name_of(parameter), slope, expected, of_losses, of_step, of_gradient);
                CHECK(std::abs(slope - expected) <= of_losses + of_step + of_gradient);
            }
        }
}

TEST_CASE("two halves of a layer's experts add up to the layer, and so do their gradients",
          "[model][cuda]") {
    ON_EACH_DEVICE();
    // What a tensor-parallel rank of two has: half of the hidden values of every expert, and the
    // whole router. One of the ranks adds biases and the router's own losses.
    for (int repeat = 0; repeat < (device_is_simulated() ? 1 : 4); ++repeat) {
        DecoderSettings settings = with_experts(settings_of_layer(), 2);
        settings.dense_layers = {};
        settings.expert_capacity = random_capacity();
        DecoderSettings half = settings;
        half.n_ff_expert /= 2;
        if (half.n_ff_shared) *half.n_ff_shared /= 2;
        const DecoderSpec spec = llama.spec(settings);
        const int M = static_cast<int>(random_int(2, device_is_simulated() ? 8 : 40));
        const RouterLosses losses{.balance = 0.3f, .level = BalanceLevel::sequence, .z_loss = 0.1f};
        LoneLayer whole(spec, M, losses), first(llama.spec(half), M, losses),
            second(llama.spec(half), M);
        const BlockParameters& p = whole.parameters();
        CAPTURE(described(spec), M);

        // A half of every run of so many values
        const auto run_of = [&](int parameter) -> size_t {
            const auto C = static_cast<size_t>(spec.n_embd),
                       F = static_cast<size_t>(spec.experts.n_ff),
                       S = static_cast<size_t>(spec.experts.n_ff_shared);
            return parameter == p.up_w            ? F * C
                   : parameter == p.up_b          ? F
                   : parameter == p.down_w        ? F
                   : parameter == p.shared_up_w   ? S * C
                   : parameter == p.shared_down_w ? S
                                                  : 0;
        };
        const auto half_of = [&](int parameter, const Floats& values, size_t which) {
            const size_t run = run_of(parameter);
            Floats part;
            for (size_t i = 0; run > 0 && i < values.size(); i += run) {
                const auto begin = values.begin() + static_cast<int64_t>(i + which * run / 2);
                part.insert(part.end(), begin, begin + static_cast<int64_t>(run / 2));
            }
            return run > 0 ? part : values;
        };
        for (const auto member : block_parameters) {
            const int i = p.*member;
            if (i < 0) continue;
            const Floats values = whole.weights(i);
            first.set(i, half_of(i, values, 0));
            second.set(i, i == p.down_b ? Floats(values.size()) : half_of(i, values, 1));
        }

        const auto n = static_cast<size_t>(M) * static_cast<size_t>(spec.n_embd);
        const Floats x = random_normal(n), dout = random_normal(n);
        const auto added = [](Floats a, const Floats& b, const Floats& less) {
            for (size_t i = 0; i < a.size(); ++i)
                a[i] = static_cast<float>(double{a[i]} + b[i] - less[i]);
            return a;
        };
        const double bound =
            2 * compare::Accuracy{.roundings = 16, .terms = M + spec.n_embd + 3 * spec.experts.n_ff}
                    .bound(DType::fp32);
        const Floats out = whole.forward(x);
        CHECK(relative_difference(added(first.forward(x), second.forward(x), x), out) <= bound);
        CHECK(first.counts() == whole.counts());
        CHECK(second.counts() == whole.counts());
        double terms = 0;  // the square of what is added up for the routers' gradients
        for (size_t i = 0; i < n; ++i) terms += std::pow(double{dout[i]} * (out[i] - x[i]), 2);
        const Floats dx = whole.backward(dout);
        CHECK(relative_difference(added(first.backward(dout), second.backward(dout), dout), dx) <=
              bound);
        for (const auto member : block_parameters) {
            const int i = p.*member;
            // Attention's are not split here; the bias of the output has its gradient on each rank.
            if (i < 0 || i == p.norm1_w || i == p.qkv_w || i == p.out_w || i == p.selection_bias)
                continue;
            CAPTURE(whole.name_of(i));
            const Floats gradient = whole.gradient(i), a = first.gradient(i),
                         b = second.gradient(i);
            if (run_of(i) > 0 || i == p.down_b) {
                CHECK(relative_difference(a, half_of(i, gradient, 0)) <= bound);
                CHECK(relative_difference(b, half_of(i, gradient, 1)) <= bound);
                continue;
            }
            // A router's gradient can be all rounding of terms that cancel: where a token has one
            // expert, whose weight is 1.
            const double of_terms = i == p.norm2_w ? 0
                                    : i == p.router_b
                                        ? std::sqrt(terms)
                                        : std::sqrt(terms * static_cast<double>(spec.n_embd));
            CHECK(relative_difference(added(a, b, Floats(a.size())), gradient) <=
                  bound * (1 + of_terms / norm_of(gradient)));
        }
    }
}

TEST_CASE("64 tokens choose 8 of 128 experts, or one, in a training step as in float64",
          "[model][cuda]") {
    ON_EACH_DEVICE();
    for (const int k : {8, 1}) {
        const int T = 64, E = 128;
        DecoderSettings settings = settings_of_layer();
        settings.n_layer = 1;
        settings.n_embd = 16;
        settings.n_expert = E, settings.n_expert_per_token = k;
        settings.n_ff_expert = random_int(3, 9);
        settings.router = random_int(0, 1) ? RouterScore::softmax : RouterScore::sigmoid;
        settings.router_normalise = k > 1;
        const DecoderSpec spec = llama.spec(settings);
        const Registry registry = registry_of(spec);
        TinyModel m(spec, 1, T, DType::fp32);
        m.parameters->state.initialize(0);  // the optimizer's moments
        CAPTURE(described(spec));

        std::vector<std::vector<double>> values;
        std::vector<int32_t> tokens, targets;
        std::unique_ptr<ReferenceDecoder> reference;
        double expected = 0;
        do {  // until no rounding error sends a token to another expert
            values.clear(), tokens.clear(), targets.clear();
            for (int i = 0; i < m.count(); ++i) {
                Floats of(random_normal(static_cast<size_t>(m.parameter(i).numel()), 0.3f));
                for (float& value : of) value += m.parameter(i).init_mean;
                m.parameters->state.set(i, of);
                values.emplace_back(of.begin(), of.end());
            }
            m.parameters->state.clear_padding();
            for (int t = 0; t < T; ++t) {
                tokens.push_back(static_cast<int32_t>(random_int(0, spec.vocab_size - 1)));
                targets.push_back(static_cast<int32_t>(random_int(0, spec.vocab_size - 1)));
            }
            reference = std::make_unique<ReferenceDecoder>(spec, registry, values);
            expected = reference->loss(tokens, targets, T);
        } while (reference->least_margin() < 1e-4);

        CHECK(m.run(tokens.data(), targets.data()) == Approx(expected).epsilon(1e-5));
        const Tensor chosen = m.routers->chosen(0);
        std::vector<int32_t> counts(E);
        copy_now(m.stream.device, counts.data(), chosen.data, chosen.bytes());
        CHECK(std::vector<double>(counts.begin(), counts.end()) == reference->counts());
        CHECK(std::ranges::count(counts, 0) < E - k);  // tokens do choose

        reference->keep_choices();
        reference->loss(tokens, targets, T);
        double squares = 0;
        for (int i = 0; i < m.count(); ++i) {
            const Floats gradient = m.gradient(i), direction = random_normal(gradient.size());
            double slope = 0;
            for (size_t j = 0; j < gradient.size(); ++j)
                slope += double{gradient[j]} * direction[j];
            const auto loss_at = [&](double step) {
                for (size_t j = 0; j < direction.size(); ++j)
                    reference->values(i)[j] =
                        values[static_cast<size_t>(i)][j] + step * direction[j];
                return reference->loss(tokens, targets, T);
            };
            constexpr double step = 1e-5;
            const double difference = (loss_at(step) - loss_at(-step)) / (2 * step);
            loss_at(0);
            const double size = norm_of(gradient);
            CAPTURE(m.parameter(i).name, slope, difference, size);
            CHECK(std::abs(slope - difference) <= 1e-4 * (size + 1e-3) + 0x1p-22 * expected);
            squares += size * size;
        }

        const auto experts = [&] {
            return m.state(ParameterState::master, registry.blocks[0].up_w);
        };
        const Floats before = experts();
        m.optimizer->update(m.stream,
                            {.adamw = {.learning_rate = 0.01f,
                                       .beta1 = 0.9f,
                                       .beta2 = 0.95f,
                                       .epsilon = 1e-8f,
                                       .step = 1}},
                            1, 0);
        CHECK(m.optimizer->state().stop == 0);
        CHECK(m.optimizer->state().norm == Approx(std::sqrt(squares)).epsilon(1e-5));
        const Floats after = experts();
        const size_t each = after.size() / E;
        for (size_t e = 0; e < E; ++e) {
            bool changed = false;
            for (size_t i = e * each; i < (e + 1) * each; ++i) {
                REQUIRE(std::isfinite(after[i]));
                changed = changed || after[i] != before[i];
            }
            CAPTURE(e, counts[e]);
            CHECK(changed == (counts[e] > 0));
        }
        const double later = m.run(tokens.data(), targets.data());
        CHECK(later < expected);
    }
}
