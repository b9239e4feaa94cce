// What a run says about the routers of a mixture: figures of a step, routers.jsonl, and warnings.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "base/json_text.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/watch/collapse_watch.h"
#include "training/watch/not_finite.h"
#include "training/watch/router_figures.h"
#include "training/watch/router_log.h"

using namespace train_gpt;

namespace {

/// A random step: layers of a model, the routers' layers, k, and what the routers did.
struct RouterStep {
    int n_layer, k, E;
    std::vector<int> layers;
    RouterReport report;
};

RouterStep random_step(bool with_biases, bool with_capacity = false) {
    RouterStep step;
    step.n_layer = static_cast<int>(random_int(1, 12));
    step.E = static_cast<int>(random_int(2, 64));
    step.k = static_cast<int>(random_int(1, std::min(step.E, 8)));
    for (int layer = 0; layer < step.n_layer; ++layer)
        if (random_int(0, 2) > 0) step.layers.push_back(layer);
    if (step.layers.empty()) step.layers.push_back(step.n_layer - 1);
    RouterReport& report = step.report;
    report.n_expert = step.E;
    for (size_t i = 0; i < step.layers.size() * static_cast<size_t>(step.E); ++i) {
        report.chosen.push_back(random_int(0, 3) == 0 ? 0
                                                      : static_cast<int32_t>(random_int(1, 5000)));
        report.mass.push_back(static_cast<int32_t>(random_int(0, 1 << 20)));
        if (with_biases) report.biases.push_back(0.001f * static_cast<float>(random_int(-99, 99)));
    }
    for (size_t r = 0; r < step.layers.size(); ++r) {
        report.chosen[r * static_cast<size_t>(step.E)] += 1;  // some token was routed
        report.mass[r * static_cast<size_t>(step.E)] += 1;
        if (with_capacity) report.dropped.push_back(static_cast<int32_t>(random_int(0, 5000)));
    }
    return step;
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

template <class T>
std::vector<double> row(const std::vector<T>& of, size_t r, int E) {
    const auto first = of.begin() + static_cast<std::ptrdiff_t>(r) * E;
    return {first, first + E};
}

double sum(const std::vector<double>& of) { return std::accumulate(of.begin(), of.end(), 0.0); }

/// log n − Σ x·log x / n, which is the entropy of the shares x/n in another form.
double entropy(const std::vector<double>& of) {
    double products = 0;
    for (const double x : of) products += x > 0 ? x * std::log(x) : 0;
    return std::log(sum(of)) - products / sum(of);
}

std::map<std::string, MetricsRecord::Value> by_name(const MetricsRecord::Fields& fields) {
    return {fields.begin(), fields.end()};
}

/// Of one router: `busy` experts share all choices equally.
RouterReport load_on(int busy, int E, int32_t each = 1000) {
    RouterReport report{.n_expert = E,
                        .chosen = std::vector<int32_t>(static_cast<size_t>(E)),
                        .mass = std::vector<int32_t>(static_cast<size_t>(E), 1)};
    std::fill_n(report.chosen.begin(), busy, each);
    return report;
}

RouterReport both(const RouterReport& a, const RouterReport& b) {
    RouterReport report = a;
    report.chosen.insert(report.chosen.end(), b.chosen.begin(), b.chosen.end());
    report.mass.insert(report.mass.end(), b.mass.begin(), b.mass.end());
    return report;
}

Config config_of(Balance balance, double z_loss = 0) {
    Config config;
    config.router.balance = balance;
    config.router.z_loss = z_loss;
    return config;
}

}  // namespace

TEST_CASE("the figures of routers are those of their counts, biases and probabilities",
          "[routers]") {
    for (int round = 0; round < 50; ++round) {
        const bool with_biases = round % 2, with_capacity = round % 4 < 2;
        const RouterStep step = random_step(with_biases, with_capacity);
        const auto figures = router_figures(step.report);
        const auto fields = by_name(router_fields(step.report, step.layers, step.n_layer));
        REQUIRE(figures.size() == step.layers.size());
        CHECK(std::ssize(fields) == 5 + with_biases + with_capacity);
        CAPTURE(step.E, step.n_layer, round);
        double largest = 0;
        int64_t idle = 0;
        for (size_t r = 0; r < figures.size(); ++r) {
            const std::vector<double> chosen = row(step.report.chosen, r, step.E);
            const double most = std::ranges::max(chosen), mean = sum(chosen) / step.E;
            CHECK(figures[r].load == Approx(most / mean).epsilon(1e-12));
            CHECK(chosen[static_cast<size_t>(figures[r].busiest)] == most);
            CHECK(figures[r].idle == std::ranges::count(chosen, 0.0));
            CHECK(figures[r].effective == Approx(std::exp(entropy(chosen))).epsilon(1e-9));
            CHECK(figures[r].entropy ==
                  Approx(entropy(row(step.report.mass, r, step.E))).epsilon(1e-9).margin(1e-9));
            largest = std::max(largest, most / mean);
            idle += std::ranges::count(chosen, 0.0);
            if (with_capacity)
                CHECK(figures[r].dropped ==
                      Approx(step.report.dropped[r] / sum(chosen)).epsilon(1e-12));
            else
                CHECK(std::isnan(figures[r].dropped));
            if (!with_biases) {
                CHECK(std::isnan(figures[r].bias_range));
                continue;
            }
            const std::vector<double> biases = row(step.report.biases, r, step.E);
            CHECK(figures[r].bias_range ==
                  Approx(std::ranges::max(biases) - std::ranges::min(biases)).margin(1e-12));
        }
        CHECK(std::get<double>(fields.at("router_load")) == Approx(largest).epsilon(1e-12));
        CHECK(std::get<int64_t>(fields.at("router_idle")) == idle);
        // Lists have a value for each layer of the model.
        for (const auto& [name, value] : fields) {
            const auto* list = std::get_if<std::vector<double>>(&value);
            if (!list) continue;
            CAPTURE(name);
            REQUIRE(std::ssize(*list) == step.n_layer);
            for (int layer = 0; layer < step.n_layer; ++layer) {
                const auto r = std::ranges::find(step.layers, layer) - step.layers.begin();
                const double of_layer = (*list)[static_cast<size_t>(layer)];
                if (r == std::ssize(step.layers)) {
                    CHECK(std::isnan(of_layer));
                    continue;
                }
                const RouterFigures& of = figures[static_cast<size_t>(r)];
                const double wanted = name == "router_load/layers"      ? of.load
                                      : name == "router_idle/layers"    ? of.idle
                                      : name == "router_entropy/layers" ? of.entropy
                                      : name == "router_dropped/layers" ? of.dropped
                                                                        : of.bias_range;
                CHECK(std::abs(of_layer - wanted) <= 0.5001e-4);  // four decimals
            }
        }
    }
}

TEST_CASE("balanced and collapsed routers have the figures' extremes", "[routers]") {
    const int E = static_cast<int>(random_int(2, 128)), k = static_cast<int>(random_int(1, E));
    const RouterFigures balanced = router_figures(load_on(E, E))[0],
                        collapsed = router_figures(load_on(k, E))[0];
    CAPTURE(E, k);
    CHECK(balanced.load == 1);
    CHECK(balanced.effective == Approx(E));
    CHECK(balanced.entropy == Approx(std::log(E)).margin(1e-12));
    CHECK(collapsed.load == Approx(static_cast<double>(E) / k));
    CHECK(collapsed.effective == Approx(k));
    CHECK(collapsed.idle == E - k);
    CHECK(router_figures({}).empty());
    CHECK(router_fields({}, {}, 4).empty());
}

TEST_CASE("routers.jsonl has at most about a hundred steps of a run, and each expert's share",
          "[routers]") {
    const TemporaryDirectory directory;
    const RouterStep shape = random_step(false);
    const int64_t steps = random_int(1, 1500);
    RouterLog log(directory.path(), {},
                  {.layers = shape.layers, .n_layer = shape.n_layer, .steps = steps});
    std::map<int64_t, RouterReport> reports;
    for (int64_t step = 1; step <= steps; ++step) {
        RouterReport report = shape.report;
        std::ranges::shuffle(report.chosen, test_rng());
        // Each layer has a token.
        for (size_t first = 0; first < report.chosen.size(); first += static_cast<size_t>(shape.E))
            report.chosen[first] += 1;
        log.add(step, reports[step] = report);
    }
    const std::vector<std::string> lines = lines_of(read(directory / "routers.jsonl"));
    CAPTURE(steps, shape.E, shape.n_layer);
    CHECK(std::ssize(lines) <= RouterLog::snapshots + 2);
    CHECK(std::ssize(lines) >= std::min<int64_t>(steps, RouterLog::snapshots / 2));
    int64_t before = 0;
    for (const std::string& line : lines) {
        const Json json = parse_json(line);
        const auto step = json.at("step").get<int64_t>();
        CHECK(step > before);
        before = step;
        const RouterReport& report = reports.at(step);
        REQUIRE(std::ssize(json.at("load")) == shape.n_layer);
        for (int layer = 0; layer < shape.n_layer; ++layer) {
            const Json& load = json.at("load")[static_cast<size_t>(layer)];
            const auto at = std::ranges::find(shape.layers, layer);
            CHECK(load.is_null() == (at == shape.layers.end()));
            if (load.is_null()) continue;
            const auto chosen =
                row(report.chosen, static_cast<size_t>(at - shape.layers.begin()), shape.E);
            REQUIRE(std::ssize(load) == shape.E);
            for (int e = 0; e < shape.E; ++e) {
                const double share =
                    1000 * chosen[static_cast<size_t>(e)] / (sum(chosen) / shape.E);
                CHECK(std::abs(load[static_cast<size_t>(e)].get<double>() - share) <= 0.5001);
            }
        }
    }
    CHECK(parse_json(lines[0]).at("step") == 1);
    CHECK(before == steps);
}

TEST_CASE("a run that resumes keeps the loads of experts up to its step", "[routers]") {
    const TemporaryDirectory directory;
    const std::string file = directory / "routers.jsonl",
                      line = "{\"step\":N,\"load\":[[1000,1000]]}\n";
    std::string lines;
    for (const char* step : {"1", "2", "3", "4"})
        lines += std::string(line).replace(line.find('N'), 1, step);
    const RouterReport report = load_on(2, 2);
    const RouterLog::Options options{.layers = {0}, .n_layer = 1, .steps = 6};
    write(file, lines + "{\"step\":5,\"lo");
    {
        RouterLog log(directory.path(), 2, options);
        log.add(3, report);
    }
    CHECK(read(file) == lines.substr(0, 3 * line.size()));
    {
        RouterLog::Options other = options;
        other.writes = false;
        RouterLog log(directory.path(), 1, other);
        log.add(4, report);
    }
    CHECK(read(file) == lines.substr(0, 3 * line.size()));
    { const RouterLog log(directory.path(), {}, options); }  // a new run
    CHECK(read(file).empty());
    CHECK(read(directory / "routers.old.jsonl") == lines.substr(0, 3 * line.size()));
    const TemporaryDirectory dense;
    { const RouterLog log(dense.path(), {}, {.layers = {}, .n_layer = 4, .steps = 6}); }
    CHECK_FALSE(std::filesystem::exists(dense / "routers.jsonl"));
}

TEST_CASE("a layer whose experts collapse is named once, until it has recovered", "[routers]") {
    constexpr int64_t lasting = CollapseWatch::steps;
    const int k = static_cast<int>(random_int(1, 3)), E = static_cast<int>(random_int(8, 64));
    const int half = (k + E) / 2;  // at most the middle
    CAPTURE(k, E);
    CollapseWatch watch({2, 5}, k, config_of(Balance::none));
    int64_t step = 0;
    const auto warnings = [&](int64_t steps, const RouterReport& report) {
        std::vector<std::string> said;
        for (int64_t i = 0; i < steps; ++i)
            if (const std::string line = watch.add(++step, report); !line.empty())
                said.push_back(line);
        return said;
    };
    const RouterReport even = both(load_on(E, E), load_on(E, E)),
                       uneven = both(load_on(E, E), load_on(k, E)),
                       above = both(load_on(E, E), load_on(half + 1, E));
    CHECK(warnings(3 * lasting, even).empty());
    CHECK(warnings(3 * lasting, above).empty());
    for (int i = 0; i < 4; ++i) {  // not in a row
        CHECK(warnings(lasting - 1, uneven).empty());
        CHECK(warnings(1, above).empty());
    }
    const std::vector<std::string> said = warnings(4 * lasting, uneven);
    REQUIRE(said.size() == 1);
    CHECK(contains(said[0], concat("layer 5 uses ", k, ".0 of ", E)));
    CHECK(contains(said[0], concat("idle experts: ", E - k, ")")));
    CHECK(contains(said[0], "router.balance=loss"));
    CHECK(contains(said[0], "router.z_loss=0.001"));
    CHECK_FALSE(contains(said[0], "layer 2"));
    // A few even steps are no recovery.
    CHECK(warnings(lasting - 1, even).empty());
    CHECK(warnings(2 * lasting, uneven).empty());
    CHECK(warnings(lasting, even).empty());
    CHECK(warnings(2 * lasting, uneven).size() == 1);
    // The other layer
    CHECK(warnings(2 * lasting, both(load_on(k, E), load_on(k, E))).size() == 1);
}

TEST_CASE("few tokens, and routers without a choice, are no collapse", "[routers]") {
    const int E = 32;
    CollapseWatch few({0}, 1, config_of(Balance::none)), all({0}, 4, config_of(Balance::none));
    for (int64_t step = 1; step <= 3 * CollapseWatch::steps; ++step) {
        CHECK(few.add(step, load_on(1, E, CollapseWatch::least_mean_load * E - 1)).empty());
        CHECK(all.add(step, load_on(4, 4)).empty());
    }
}

TEST_CASE("a warning about collapsed experts suggests what the run does not do yet", "[routers]") {
    const auto advice = [](const Config& config) {
        CollapseWatch watch({0, 1, 2, 3, 4, 5}, 1, config);
        RouterReport report = load_on(1, 8);
        for (int i = 1; i < 6; ++i) report = both(report, load_on(1, 8));
        std::string said;
        for (int64_t step = 1; step <= CollapseWatch::steps; ++step)
            said += watch.add(step, report);
        return said;
    };
    const std::string none = advice(config_of(Balance::none)),
                      loss = advice(config_of(Balance::loss, 1e-3)),
                      bias = advice(config_of(Balance::bias));
    CHECK(contains(none, "router.balance=bias"));
    CHECK(contains(none, "and 2 more layers"));
    CHECK(contains(loss, "a larger router.balance_rate than 0.01"));
    CHECK_FALSE(contains(loss, "z_loss"));
    CHECK(contains(bias, "a larger router.balance_rate than 0.001"));
    CHECK(contains(bias, "router.z_loss=0.001"));
}

TEST_CASE("the first router with probabilities that are not finite is named by its layer",
          "[routers]") {
    RouterReport report = both(load_on(4, 4), load_on(4, 4));
    report.not_finite = {0, 0};
    CHECK(describe_router_not_finite({3, 7}, report).empty());
    report.not_finite = {0, 1};
    CHECK(contains(describe_router_not_finite({3, 7}, report), "the router of layer 7 "));
    CHECK(contains(describe_router_not_finite({3, 7}, report), "in 1 sequence"));
    report.not_finite = {2, 1};
    CHECK(contains(describe_router_not_finite({3, 7}, report), "the router of layer 3 "));
    CHECK(describe_router_not_finite({}, {}).empty());
}
