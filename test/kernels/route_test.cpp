#include "kernels/experts/route.h"

#include <numeric>

#include "test/kernels/experts_reference.h"
#include "test/kernels/kernel_test.h"

namespace train_gpt {

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

/// N random tokens of a router, and room for the results.
struct Router {
    int64_t N, E, k, S;
    RouterRule rule;
    Buffer logits, bias, weights, probabilities, squared_lse, dweights, load;
    SharedArray<int32_t> experts, counts;
    bool has_bias = false;

    Router(int64_t N_, int64_t E_, int64_t k_, RouterRule rule_, int64_t S_ = 1, float spread = 2)
        : N(N_),
          E(E_),
          k(k_),
          S(S_),
          rule(rule_),
          logits(DType::fp32, {N, E}, random_normal(static_cast<size_t>(N * E), spread)),
          bias(DType::fp32, {E}, random_normal(static_cast<size_t>(E), 0.2f)),
          weights(DType::fp32, {N, k}),
          probabilities(DType::fp32, {S, E}),
          squared_lse(DType::fp32, {S}),
          dweights(DType::fp32, {N, k}, random_normal(static_cast<size_t>(N * k))),
          load(DType::fp32, {S, E}, random_normal(static_cast<size_t>(S * E))),
          experts(static_cast<size_t>(N * k)),
          counts(static_cast<size_t>(S * E)) {}

    void forward() const {
        TestStream stream(route_scratch_bytes(N, S, E));
        route(stream, {.logits = logits,
                       .selection_bias = has_bias ? bias.tensor() : Tensor{},
                       .rule = rule,
                       .experts = Tensor(experts.data(), DType::int32, {N, k}),
                       .weights = weights,
                       .counts = Tensor(counts.data(), DType::int32, {S, E}),
                       .probabilities = probabilities,
                       .squared_lse = squared_lse});
    }
    std::vector<int32_t> chosen() const {
        return {experts.values().begin(), experts.values().end()};
    }
    RouteProblem problem() const {
        return {.N = N,
                .E = E,
                .k = k,
                .S = S,
                .rule = rule,
                .logits = logits.values(),
                .experts = chosen()};
    }
    /// Whether the chosen experts of every token have the largest values, in order, the lower
    /// expert first. Values that are `within` of each other may come in any order.
    bool chose_largest(const std::function<double(int64_t t, int64_t i)>& value,
                       double within) const {
        const std::vector<int32_t> all = chosen();
        for (int64_t t = 0; t < N; ++t) {
            std::vector<bool> taken(static_cast<size_t>(E));
            for (int64_t j = 0; j < k; ++j) {
                const int32_t e = all[static_cast<size_t>(t * k + j)];
                if (e < 0 || e >= E || taken[static_cast<size_t>(e)]) return false;
                taken[static_cast<size_t>(e)] = true;
                for (int64_t i = 0; i < E; ++i) {
                    if (taken[static_cast<size_t>(i)]) continue;
                    const double better = value(t, i) - value(t, e);
                    if (better > within || (within == 0 && better == 0 && i < e)) return false;
                }
            }
        }
        return true;
    }
};

RouterRule random_rule() {
    return {.score = random_int(0, 1) ? RouterScore::softmax : RouterScore::sigmoid,
            .normalise = random_int(0, 1) == 1,
            .scale = random_int(0, 1) ? 1.0f : 2.5f};
}

void for_each_router(const std::function<void(Router&)>& check) {
    const int64_t most = device_is_simulated() ? 70 : 300;
    for (const int64_t E : {int64_t{1}, int64_t{7}, int64_t{32}, int64_t{60}, int64_t{128},
                            int64_t{512}, random_int(1, 512)}) {
        for (const RouterScore score : {RouterScore::softmax, RouterScore::sigmoid}) {
            for (const bool normalise : {false, true}) {
                const int64_t S = random_int(1, 3),
                              N = S * random_int(1, E > 100 ? most / 10 : most / 3);
                Router router(N, E, random_int(1, std::min<int64_t>(E, 16)),
                              {score, normalise, random_int(0, 1) ? 1.0f : 2.5f}, S);
                CAPTURE(N, E, router.k, S, score == RouterScore::softmax, normalise);
                check(router);
            }
        }
    }
}

}  // namespace

TEST_CASE("route chooses the experts with the largest logits, with the weights of the formula",
          "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for_each_router([&](Router& router) {
        router.forward();
        const Values z = router.logits.values();
        CHECK(router.chose_largest([&](int64_t t, int64_t i) { return z[t * router.E + i]; }, 0));
        const RouteProblem problem = router.problem();
        const RouteReference exact = route_reference<double>(problem),
                             plain = route_reference<float>(problem);
        accuracy.check("weights", DType::fp32, router.weights.values(), plain.weights,
                       exact.weights);
        accuracy.check("probabilities", DType::fp32, router.probabilities.values(),
                       plain.probabilities, exact.probabilities);
        accuracy.check("squared_lse", DType::fp32, router.squared_lse.values(), plain.squared_lse,
                       exact.squared_lse);
        CHECK(std::ranges::equal(router.counts.values(), exact.counts));
    });
}

TEST_CASE("route with a selection bias chooses by score plus bias and weighs by the score",
          "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for_each_router([&](Router& router) {
        router.has_bias = true;
        router.forward();
        const Values z = router.logits.values(), bias = router.bias.values();
        std::vector<RouterScores<double>> scores;
        for (int64_t t = 0; t < router.N; ++t)
            scores.emplace_back(&z[static_cast<size_t>(t * router.E)], router.E, router.rule.score);
        CHECK(router.chose_largest(
            [&](int64_t t, int64_t i) { return scores[t].scores[i] + bias[i]; }, 1e-6));
        const RouteProblem problem = router.problem();
        accuracy.check("weights", DType::fp32, router.weights.values(),
                       route_reference<float>(problem).weights,
                       route_reference<double>(problem).weights);
    });
}

TEST_CASE("route gives ties to the lower expert", "[cuda]") {
    ON_EACH_DEVICE();
    for (const bool has_bias : {false, true}) {
        Router tied(random_int(10, 60), random_int(16, 150), random_int(2, 16), random_rule());
        tied.has_bias = has_bias;
        // Few distinct values, among them both zeros.
        for (size_t i = 0; i < static_cast<size_t>(tied.N * tied.E); ++i)
            tied.logits.set(i, std::array{-0.0f, 0.0f, -1.0f, -2.0f}[random_int(0, 3)]);
        for (size_t i = 0; i < static_cast<size_t>(tied.E); ++i) tied.bias.set(i, 0.5f);
        tied.forward();
        const Values z = tied.logits.values();
        CHECK(tied.chose_largest([&](int64_t t, int64_t i) { return z[t * tied.E + i]; }, 0));
    }
}

TEST_CASE("route takes a logit of -inf as a mask", "[cuda]") {
    ON_EACH_DEVICE();
    for (const bool has_bias : {false, true}) {
        Router router(20, random_int(20, 80), random_int(1, 8), random_rule());
        router.has_bias = has_bias;
        // Expert 3 would be chosen by its bias; of the last token too few experts are left.
        router.bias.set(3, 100);
        for (int64_t t = 0; t < router.N; ++t)
            router.logits.set(static_cast<size_t>(t * router.E + 3), -infinity);
        const int64_t last = router.N - 1, left = random_int(1, router.k);
        for (int64_t i = 0; i < router.E; ++i)
            router.logits.set(static_cast<size_t>(last * router.E + i),
                              i >= 10 && i < 10 + left ? 1.0f + static_cast<float>(i) : -infinity);
        router.forward();
        const std::vector<int32_t> chosen = router.chosen();
        const auto last_begin = chosen.begin() + last * router.k;
        CHECK(std::find(chosen.begin(), last_begin, 3) == last_begin);
        double sum = 0;
        for (int64_t j = 0; j < router.k; ++j) {
            const double weight = router.weights[static_cast<size_t>(last * router.k + j)];
            sum += weight;
            if (j < left)
                CHECK((last_begin[j] >= 10 && last_begin[j] < 10 + left));
            else
                CHECK(weight == 0);
        }
        if (router.rule.normalise) CHECK(std::abs(sum / router.rule.scale - 1) < 1e-6);
        const RouteReference exact = route_reference<double>(router.problem());
        for (size_t i = 0; i < exact.probabilities.size(); ++i)
            CHECK(std::abs(router.probabilities[i] - exact.probabilities[i]) <
                  1e-5 * (1 + exact.probabilities[i]));
    }
}

TEST_CASE("route keeps a NaN of the logits visible and in range", "[cuda]") {
    ON_EACH_DEVICE();
    for (const bool has_bias : {false, true}) {
        Router router(random_int(2, 20), random_int(8, 300), random_int(1, 8), random_rule());
        router.has_bias = has_bias;
        const int64_t bad = random_int(0, router.N - 1);
        router.logits.set(static_cast<size_t>(bad * router.E + random_int(0, router.E - 1)),
                          std::numeric_limits<float>::quiet_NaN());
        router.forward();
        const std::vector<int32_t> chosen = router.chosen();
        for (int64_t t = 0; t < router.N; ++t) {
            for (int64_t j = 0; j < router.k; ++j) {
                const auto slot = static_cast<size_t>(t * router.k + j);
                CHECK(std::isnan(router.weights[slot]) == (t == bad));
                if (t == bad) CHECK(chosen[slot] == j);
            }
        }
        CHECK(std::isnan(router.probabilities[0]));
        const auto counts = router.counts.values();
        CHECK(std::accumulate(counts.begin(), counts.end(), 0) == router.N * router.k);
    }
}

TEST_CASE("route normalises scores that are far below 1", "[cuda]") {
    ON_EACH_DEVICE();
    for (const RouterScore score : {RouterScore::softmax, RouterScore::sigmoid}) {
        Router router(4, 40, 4, {score, true, 1});
        router.has_bias = true;
        // The biases choose experts whose scores would vanish in fp32.
        for (size_t i = 0; i < 4; ++i) router.bias.set(i, 10.0f - static_cast<float>(i));
        for (int64_t t = 0; t < router.N; ++t)
            for (int64_t i = 0; i < 4; ++i)
                router.logits.set(static_cast<size_t>(t * router.E + i),
                                  -200.0f - static_cast<float>(t * i) * 0.25f);
        router.forward();
        const RouteReference exact = route_reference<double>(router.problem());
        for (size_t i = 0; i < exact.weights.size(); ++i)
            CHECK(std::abs(router.weights[i] - exact.weights[i]) < 1e-5);
    }
}

TEST_CASE("route_backward is the gradient of weights, balance and z-loss", "[cuda]") {
    ON_EACH_DEVICE();
    for_each_router([&](Router& router) {
        router.has_bias = random_int(0, 1) == 1;
        router.forward();
        RouteProblem problem = router.problem();
        problem.dweights = router.dweights.values();
        const bool has_load = random_int(0, 3) > 0;
        const float z_loss = random_int(0, 1) ? 0.0f : 0.05f;
        if (has_load) problem.load = router.load.values();
        problem.balance = has_load ? 0.25 : 0;
        problem.z_loss = z_loss;
        const RouteReference exact = route_reference<double>(problem);
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            const Buffer dlogits(dtype, {router.N, router.E});
            TestStream stream;
            route_backward(stream, {.dlogits = dlogits,
                                    .logits = router.logits,
                                    .rule = router.rule,
                                    .experts = Tensor(router.experts.data(), DType::int32,
                                                      {router.N, router.k}),
                                    .dweights = router.dweights,
                                    .load = has_load ? router.load.tensor() : Tensor{},
                                    .balance = 0.25f,
                                    .z_loss = z_loss});
            // The terms may cancel. A probability e^−x of fp32 numbers errs by 2⁻²⁴·x.
            double worst = 0;
            for (size_t i = 0; i < exact.dlogits.size(); ++i) {
                const double rounding =
                    dtype == DType::bf16 ? 0x1p-8 * std::abs(exact.dlogits[i]) : 0;
                worst = worse(worst, std::abs(dlogits[i] - exact.dlogits[i]) /
                                         (rounding + 4e-6 * exact.dlogits_terms[i] + 1e-37));
            }
            CAPTURE(name_of(dtype), has_load, z_loss);
            CHECK(worst <= 1);
        }
    });
}

TEST_CASE("route gives a token the same bits whatever else is in the batch", "[cuda]") {
    ON_EACH_DEVICE();
    const Router all(random_int(5, device_is_simulated() ? 70 : 200), random_int(4, 200), 4,
                     random_rule());
    all.forward();
    const int64_t t = random_int(0, all.N - 1);
    Router one(1, all.E, all.k, all.rule);
    for (int64_t i = 0; i < all.E; ++i)
        one.logits.set(static_cast<size_t>(i),
                       static_cast<float>(all.logits[static_cast<size_t>(t * all.E + i)]));
    one.forward();
    for (int64_t j = 0; j < all.k; ++j) {
        const auto slot = static_cast<size_t>(t * all.k + j);
        CHECK(one.experts.values()[static_cast<size_t>(j)] == all.experts.values()[slot]);
        CHECK(one.weights[static_cast<size_t>(j)] == all.weights[slot]);
    }
}

TEST_CASE("route gives the same bits whatever the number of threads, and in every run", "[cuda]") {
    ON_EACH_DEVICE();
    const int64_t S = random_int(1, 3), N = S * random_int(1, device_is_simulated() ? 90 : 300);
    const Router router(N, random_int(8, 100), random_int(1, 8), random_rule(), S);
    check_thread_independence([&] {
        router.forward();
        const Buffer dlogits(DType::fp32, {router.N, router.E});
        TestStream stream;
        route_backward(
            stream, {.dlogits = dlogits,
                     .logits = router.logits,
                     .rule = router.rule,
                     .experts = Tensor(router.experts.data(), DType::int32, {router.N, router.k}),
                     .dweights = router.dweights,
                     .load = router.load,
                     .balance = 1,
                     .z_loss = 1e-3f});
        const auto counts = router.counts.values();
        return router.weights.bytes() + router.probabilities.bytes() + router.squared_lse.bytes() +
               dlogits.bytes() +
               std::string(reinterpret_cast<const char*>(counts.data()), counts.size_bytes());
    });
}

TEST_CASE("expert_load is each expert's share, and equal where nothing was counted", "[cuda]") {
    ON_EACH_DEVICE();
    const int64_t E = random_int(1, 512);
    const SharedArray<int32_t> counts(static_cast<size_t>(2 * E));
    int64_t total = 0;
    for (size_t i = 0; i < static_cast<size_t>(2 * E); ++i) {
        counts.data()[i] =
            i < static_cast<size_t>(E) ? static_cast<int32_t>(random_int(0, 1'000'000'000 / E)) : 0;
        total += counts.data()[i];
    }
    const Buffer load(DType::fp32, {2, E});
    TestStream stream;
    expert_load(stream, load, Tensor(counts.data(), DType::int32, {2, E}));
    for (int64_t i = 0; i < E; ++i) {
        const double exact = static_cast<double>(counts.values()[static_cast<size_t>(i)]) /
                             static_cast<double>(total);
        CHECK(std::abs(load[static_cast<size_t>(i)] - exact) <= 1e-6 * exact);
        CHECK(load[static_cast<size_t>(E + i)] == 1.0f / static_cast<float>(E));
    }
}

}  // namespace train_gpt
