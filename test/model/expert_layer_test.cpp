// Mixtures of experts in whole models. Random mixtures against a float64 reference are among the
// decoders of stage_contracts_test.cpp.
#include "model/expert_layer.h"

#include <cmath>
#include <functional>

#include "device/copy.h"
#include "model/families/llama.h"
#include "test/catch.h"
#include "test/model/random_spec.h"
#include "test/model/tiny_model.h"
#include "test/random.h"

using namespace train_gpt;

namespace {

DecoderSettings small_llama() {
    return {.n_layer = 2,
            .n_head = 2,
            .n_embd = 8 * random_int(2, 4),
            .n_ctx = 64,
            .vocab_size = 60,
            .n_ff = random_int(5, 40)};
}

std::vector<int32_t> random_tokens(size_t n, int64_t vocab_size) {
    std::vector<int32_t> tokens(n);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random_int(0, vocab_size - 1));
    return tokens;
}

std::vector<int32_t> counts_of(const TinyModel& m, int router) {
    const Tensor chosen = m.routers->chosen(router);
    std::vector<int32_t> counts(static_cast<size_t>(chosen.numel()));
    copy_now(m.stream.device, counts.data(), chosen.data, chosen.bytes());
    return counts;
}

int32_t dropped_of(const TinyModel& m, int router) {
    int32_t dropped = 0;
    copy_now(m.stream.device, &dropped, m.routers->dropped(router).data, sizeof dropped);
    return dropped;
}

}  // namespace

TEST_CASE("one expert computes what an MLP with its weights does", "[model][cuda]") {
    ON_EACH_DEVICE();
    const int B = 2, T = static_cast<int>(random_int(2, 9));
    DecoderSettings settings = small_llama();
    const DecoderSpec dense_spec = llama.spec(settings);
    settings.n_expert = settings.n_expert_per_token = 1;
    settings.n_ff_expert = settings.n_ff;
    settings.router_normalise = random_int(0, 1) == 0;  // softmax over one expert is 1
    const DecoderSpec spec = llama.spec(settings);
    TinyModel dense(dense_spec, B, T, DType::fp32), mixture(spec, B, T, DType::fp32);
    for (TinyModel* m : {&dense, &mixture}) m->stream.settings.gemm = KernelSettings::Gemm::own;

    const Registry theirs = registry_of(dense_spec), ours = registry_of(spec);
    for (int i = 0; i < mixture.count(); ++i)
        mixture.parameters->state.set(
            i, random_normal(static_cast<size_t>(mixture.parameter(i).numel()), 0.1f));
    for (size_t l = 0; l < ours.blocks.size(); ++l)
        for (const auto member : block_parameters)
            if (const int to = theirs.blocks[l].*member; to >= 0) {
                std::vector<float> values(static_cast<size_t>(dense.parameter(to).numel()));
                mixture.parameters->state.read_weights(ours.blocks[l].*member, 0, values);
                dense.parameters->state.set(to, values);
            }
    for (const auto member : {&Registry::tokens, &Registry::final_norm_w, &Registry::head}) {
        std::vector<float> values(static_cast<size_t>(dense.parameter(theirs.*member).numel()));
        mixture.parameters->state.read_weights(ours.*member, 0, values);
        dense.parameters->state.set(theirs.*member, values);
    }
    for (TinyModel* m : {&dense, &mixture}) m->parameters->state.clear_padding();
    const auto n = static_cast<size_t>(B * T);
    const std::vector<int32_t> tokens = random_tokens(n, spec.vocab_size),
                               targets = random_tokens(n, spec.vocab_size);
    dense.run(tokens.data(), targets.data());
    mixture.run(tokens.data(), targets.data());
    CAPTURE(T, described(spec));
    CHECK(relative_difference(mixture.losses(), dense.losses()) < 1e-6);
    for (size_t l = 0; l < ours.blocks.size(); ++l) {
        for (const auto member : block_parameters)
            if (const int i = theirs.blocks[l].*member; i >= 0) {
                CAPTURE(dense.parameter(i).name);
                CHECK(relative_difference(mixture.gradient(ours.blocks[l].*member),
                                          dense.gradient(i)) < 1e-5);
            }
        // Whatever its logit, the one expert has the weight 1.
        for (const float gradient : mixture.gradient(ours.blocks[l].router_w))
            CHECK(std::abs(gradient) <= 1e-6f);
    }
}

TEST_CASE("all tokens may go to one expert, and experts without tokens have no gradient",
          "[model][cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        const int B = 1, T = 64;
        DecoderSettings settings = small_llama();
        const bool many = random_int(0, 1) == 0;
        settings.n_expert = many ? 128 : random_int(4, 9);
        settings.n_expert_per_token = many ? 8 : 1;
        settings.n_ff_expert = 8 * random_int(1, 3);
        settings.router_bias = true;
        const bool has_capacity = random_int(0, 1) == 0;
        settings.expert_capacity = has_capacity ? 1 : 0;
        const DecoderSpec spec = llama.spec(settings);
        TinyModel m(spec, B, T, dtype);
        m.parameters->state.initialize(test_rng()());
        const Registry registry = registry_of(spec);
        const auto E = static_cast<size_t>(spec.experts.n_expert);
        const auto k = static_cast<size_t>(spec.experts.n_expert_per_token);
        // So large that the tokens' own logits do not matter
        const size_t first = static_cast<size_t>(random_int(0, static_cast<int64_t>(E - k)));
        std::vector<float> bias(E);
        for (size_t i = 0; i < k; ++i) bias[first + i] = 50;
        for (const BlockParameters& p : registry.blocks) m.parameters->state.set(p.router_b, bias);
        const std::vector<int32_t> tokens = random_tokens(T, spec.vocab_size),
                                   targets = random_tokens(T, spec.vocab_size);
        const double loss = m.run(tokens.data(), targets.data());
        CAPTURE(E, k, first, name_of(dtype), has_capacity);
        CHECK(std::isfinite(loss));
        for (size_t l = 0; l < registry.blocks.size(); ++l) {
            // Each of the k experts takes T·k/E tokens, rounded up.
            if (has_capacity)
                CHECK(dropped_of(m, static_cast<int>(l)) ==
                      static_cast<int32_t>(k * (T - (T * k + E - 1) / E)));
            const std::vector<int32_t> counts = counts_of(m, static_cast<int>(l));
            for (const int w : {registry.blocks[l].up_w, registry.blocks[l].down_w}) {
                const std::vector<float> gradient = m.gradient(w);
                const size_t each = gradient.size() / E;
                for (size_t e = 0; e < E; ++e) {
                    const bool used = e >= first && e < first + k;
                    CHECK(counts[e] == (used ? T : 0));
                    double square = 0;
                    for (size_t i = 0; i < each; ++i)
                        square += double{gradient[e * each + i]} * gradient[e * each + i];
                    CHECK(std::isfinite(square));
                    CHECK((square > 0) == used);
                }
            }
        }
    }
}

TEST_CASE("recomputation routes no token twice", "[model][cuda]") {
    ON_EACH_DEVICE();
    const int B = 2, T = 8;
    DecoderSettings settings = small_llama();
    settings.n_expert = 5, settings.n_expert_per_token = 2;
    settings.n_ff_shared = 6, settings.shared_gate = true;
    settings.expert_capacity = random_int(0, 1) == 0 ? 0 : 0.8;
    const DecoderSpec spec = llama.spec(settings);
    const auto n = static_cast<size_t>(B * T);
    const std::vector<int32_t> tokens = random_tokens(n, spec.vocab_size),
                               targets = random_tokens(n, spec.vocab_size);
    const uint64_t seed = test_rng()();
    std::vector<std::vector<float>> gradients;
    for (const Recompute level : {Recompute::none, Recompute::elementwise, Recompute::block}) {
        TinyModel m(spec, registry_of(spec),
                    {.B = B,
                     .T = T,
                     .recompute = level,
                     .router_losses = {.balance = 0.5f, .level = BalanceLevel::sequence}},
                    DType::bf16);
        m.parameters->state.initialize(seed);
        m.run(tokens.data(), targets.data(), true, 2);
        m.run(tokens.data(), targets.data(), false, 2);
        for (int router = 0; router < spec.n_layer; ++router) {
            int64_t total = 0;
            for (const int32_t count : counts_of(m, router)) total += count;
            CHECK(total == 2 * B * T * 2);  // micro-batches, tokens, experts of a token
        }
        for (size_t i = 0; i < static_cast<size_t>(m.count()); ++i) {
            const std::vector<float> gradient = m.gradient(static_cast<int>(i));
            if (level == Recompute::none)
                gradients.push_back(gradient);
            else
                CHECK(gradient == gradients[i]);
        }
    }
}

TEST_CASE("an expert takes its share of a sequence, rounded up", "[model]") {
    const auto most = [](double capacity, int E, int k, int64_t T) {
        return ExpertSpec{.n_expert = E, .n_expert_per_token = k, .capacity = capacity}.most_routes(
            T);
    };
    CHECK(most(0, 8, 2, 1024) == 0);
    CHECK(most(1, 8, 2, 1024) == 256);
    CHECK(most(1.25, 8, 2, 1024) == 320);
    CHECK(most(1, 8, 2, 1023) == 256);
    CHECK(most(1, 64, 8, 7) == 1);
    CHECK(most(0.001, 64, 1, 8) == 1);
    // In floating point, 1.1 · 10 is more than 11.
    CHECK(most(1.1, 8, 1, 80) == 11);
    CHECK(most(1.1, 8, 1, 88) == 13);
    // No expert has more tokens than there are.
    CHECK(most(4, 8, 2, 1024) == 0);
    CHECK(most(3.999, 8, 2, 1024) == 0);
    CHECK(most(3.99, 8, 2, 1024) == 1022);
    CHECK(most(512, 8, 2, 1024) == 0);
    CHECK(most(0.5, 1, 1, 9) == 5);
}

TEST_CASE("a capacity that no expert exceeds changes no bit, and evaluations have none",
          "[model][cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        const int T = static_cast<int>(random_int(20, 40));
        DecoderSettings settings = small_llama();
        settings.n_layer = 1;
        settings.n_expert = random_int(3, 9), settings.n_expert_per_token = random_int(1, 2);
        settings.n_ff_expert = 8;
        const DecoderSpec dropless = llama.spec(settings);
        const std::vector<int32_t> tokens = random_tokens(static_cast<size_t>(T), 60),
                                   targets = random_tokens(static_cast<size_t>(T), 60);
        std::vector<std::vector<float>> weights;
        for (const Parameter& p : registry_of(dropless).parameters)
            weights.push_back(random_normal(static_cast<size_t>(p.numel()), 0.3f));
        const auto run = [&](const DecoderSpec& spec) {
            auto m = std::make_unique<TinyModel>(spec, 1, T, dtype);
            for (int i = 0; i < m->count(); ++i)
                m->parameters->state.set(i, weights[static_cast<size_t>(i)]);
            m->parameters->state.clear_padding();
            m->run(tokens.data(), targets.data());
            return m;
        };
        const auto all = run(dropless);
        const std::vector<int32_t> counts = counts_of(*all, 0);
        const int32_t busiest = std::ranges::max(counts);
        // An expert takes so many tokens.
        const auto with = [&](int32_t most) {
            DecoderSpec spec = dropless;
            spec.experts.capacity = static_cast<double>(most) *
                                    static_cast<double>(spec.experts.n_expert) /
                                    (T * spec.experts.n_expert_per_token);
            return run(spec);
        };
        const auto enough = with(busiest), one_less = with(busiest - 1);
        CAPTURE(described(dropless), name_of(dtype), T, busiest);
        CHECK(enough->losses() == all->losses());
        for (int i = 0; i < all->count(); ++i) CHECK(enough->gradient(i) == all->gradient(i));
        CHECK(dropped_of(*enough, 0) == 0);
        CHECK(dropped_of(*one_less, 0) == std::ranges::count(counts, busiest));
        CHECK(counts_of(*one_less, 0) == counts);
        CHECK(one_less->losses() != all->losses());
        // Before the first token that is dropped, nothing changes.
        CHECK(one_less->losses()[0] == all->losses()[0]);

        TokenBatch batch = one_less->batch();
        batch.trains = false;
        one_less->model->forward(one_less->stream, 0, batch);
        one_less->model->evaluate_head(one_less->stream, 0, batch);
        CHECK(one_less->losses() == all->losses());
    }
}

TEST_CASE("a layer's experts are a unit of their own, after the rest of the layer", "[model]") {
    DecoderSettings settings = small_llama();
    settings.n_layer = 4, settings.n_expert = 3, settings.n_expert_per_token = 2;
    settings.n_ff_shared = 8, settings.shared_gate = true, settings.selection_bias = true;
    settings.dense_layers = {1};
    const DecoderSpec spec = llama.spec(settings);
    const Registry whole = registry_of(spec);
    const auto check = [&](const Registry& r, int first, int layers) {
        int unit = r.begins_model() ? 1 : 0;
        for (int i = 0; i < layers; ++i, ++unit) {
            const BlockParameters& p = r.blocks[static_cast<size_t>(i)];
            CAPTURE(first, i);
            CHECK(r.unit_of_block(i) == unit);
            for (const auto member : block_parameters) {
                if (p.*member < 0) continue;
                const bool of_experts =
                    member == &BlockParameters::up_w || member == &BlockParameters::up_b ||
                    member == &BlockParameters::down_w || member == &BlockParameters::down_b;
                const bool apart = of_experts && spec.has_experts(first + i);
                CHECK(r.unit_of(p.*member) == unit + apart);
            }
            unit += spec.has_experts(first + i);
        }
        CHECK(r.last_unit() == unit - (r.ends_model() ? 0 : 1));
    };
    check(whole, 0, 4);
    check(stage_of(whole, 0, 2), 0, 2);
    check(stage_of(whole, 1, 3), 1, 2);
    check(stage_of(whole, 2, 4), 2, 2);
}

TEST_CASE("each expert's projections are matrices of their own, and routers are none", "[model]") {
    DecoderSettings settings = small_llama();
    settings.n_expert = 5, settings.n_expert_per_token = 2, settings.n_ff_expert = 6;
    const DecoderSpec spec = llama.spec(settings);
    const Registry r = registry_of(spec);
    const auto parameter = [&](int i) { return r.parameters[static_cast<size_t>(i)]; };
    const BlockParameters& p = r.blocks[0];
    const int64_t E = 5, F = 6, C = spec.n_embd;
    CHECK(parameter(p.router_w).update == Update::elements);
    const std::vector<Range> up = matrices_of(parameter(p.up_w), false),
                             down = matrices_of(parameter(p.down_w), false);
    REQUIRE(std::ssize(up) == 2 * E);
    REQUIRE(std::ssize(down) == E);
    for (int64_t i = 0; i < 2 * E; ++i)
        CHECK((up[static_cast<size_t>(i)].first == i * F && up[static_cast<size_t>(i)].n == F));
    for (int64_t e = 0; e < E; ++e)
        CHECK((down[static_cast<size_t>(e)].first == e * C && down[static_cast<size_t>(e)].n == C));
}
