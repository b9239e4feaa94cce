#include "parallel/pipeline/stage_layers.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "parallel/axes/pipeline.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

/// Costs of the stages, the largest first.
std::vector<double> costs_of(const std::vector<int>& layers, const LayerCosts& costs) {
    std::vector<double> all;
    size_t next = 0;
    for (const int n : layers) {
        double& cost = all.emplace_back(0);
        for (const size_t end = next + static_cast<size_t>(n); next < end; ++next)
            cost += costs.layers[next];
    }
    all.front() += costs.embedding;
    all.back() += costs.head;
    std::sort(all.begin(), all.end(), std::greater<>());
    return all;
}

/// `layers` that cost the same.
LayerCosts alike(int layers, double cost, double embedding = 0, double head = 0) {
    return {std::vector<double>(static_cast<size_t>(layers), cost), embedding, head};
}

/// The least costs among all ways to cut the layers into `stages`.
std::vector<double> least_costs(int stages, const LayerCosts& costs) {
    std::vector<double> least;
    std::vector<int> cut;
    const std::function<void(int)> extend = [&](int left) {
        if (static_cast<int>(cut.size()) == stages - 1) {
            cut.push_back(left);
            const std::vector<double> these = costs_of(cut, costs);
            if (least.empty() || these < least) least = these;
            cut.pop_back();
            return;
        }
        for (int n = 1; left - n >= stages - 1 - static_cast<int>(cut.size()); ++n) {
            cut.push_back(n);
            extend(left - n);
            cut.pop_back();
        }
    };
    extend(static_cast<int>(costs.layers.size()));
    return least;
}

}  // namespace

TEST_CASE("layers are dealt so that no way to cut the model has a cheaper most expensive stage",
          "[stage_layers]") {
    for (int repeat = 0; repeat < 300; ++repeat) {
        const int stages = static_cast<int>(random_int(1, 5));
        const int layers = stages + static_cast<int>(random_int(0, 9));
        LayerCosts costs =
            alike(layers, static_cast<double>(random_int(1, 8)),
                  static_cast<double>(random_int(0, 20)), static_cast<double>(random_int(0, 40)));
        if (random_int(0, 1))
            for (double& cost : costs.layers) cost = static_cast<double>(random_int(1, 8));
        const std::vector<int> dealt = deal_layers(costs, stages);
        CAPTURE(layers, stages, costs.layers, costs.embedding, costs.head, dealt);
        REQUIRE(dealt.size() == static_cast<size_t>(stages));
        REQUIRE(std::accumulate(dealt.begin(), dealt.end(), 0) == layers);
        REQUIRE(*std::min_element(dealt.begin(), dealt.end()) >= 1);
        REQUIRE(costs_of(dealt, costs) == least_costs(stages, costs));
        REQUIRE(!pipeline_problem({.ranks = stages, .layers_per_stage = dealt}, layers));
    }
}

TEST_CASE("stages with embedding and head have fewer layers, and what is left goes to later stages",
          "[stage_layers]") {
    // Llama 3 405B: 126 layers are 128 less one each for embedding and head.
    CHECK(deal_layers(alike(126, 1, 1, 1), 16) ==
          std::vector<int>{7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7});
    CHECK(deal_layers(alike(12, 1, 0, 5.4), 4) == std::vector<int>{3, 4, 4, 1});
    CHECK(deal_layers(alike(10, 1), 4) == std::vector<int>{2, 2, 3, 3});
    // Two cheap layers before expensive ones
    CHECK(deal_layers({{1, 1, 4, 4, 4, 4}}, 3) == std::vector<int>{3, 1, 2});
    CHECK(deal_layers(alike(7, 1, 2, 3), 1) == std::vector<int>{7});
}

TEST_CASE("a model with fewer layers than stages is refused with what to change",
          "[stage_layers]") {
    CHECK(
        error_of([] { deal_layers(alike(3, 1), 4); }) ==
        "a model of 3 layers cannot be cut into 4 pipeline stages, which need a layer each; lower "
        "parallel.pipeline or parallel.stages_per_rank");
}
