#include "parallel/pipeline/stage_layers.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "base/error.h"

namespace train_gpt {

namespace {

/// Layers that cost the same: each may simply go where it costs least.
std::vector<int> deal_equal_layers(const LayerCosts& costs, int stages) {
    const auto n = static_cast<size_t>(stages);
    std::vector<int> dealt(n, 1);
    const auto cost_with_one_more = [&](size_t stage) {
        return (dealt[stage] + 1) * costs.layers[0] + (stage == 0 ? costs.embedding : 0) +
               (stage == n - 1 ? costs.head : 0);
    };
    for (int left = static_cast<int>(costs.layers.size()) - stages; left > 0; --left) {
        size_t cheapest = n - 1;
        for (size_t stage = n - 1; stage-- > 0;)
            if (cost_with_one_more(stage) < cost_with_one_more(cheapest)) cheapest = stage;
        ++dealt[cheapest];
    }
    return dealt;
}

/// A way to cut the first layers into stages.
struct Cut {
    std::vector<int> dealt;
    std::vector<double> costs;  // of the stages, the largest first
};

/// Any layers, by dynamic programming over the layers and stages so far: costs that are less stay
/// less when both get the same stage more.
std::vector<int> deal_any_layers(const LayerCosts& costs, int stages) {
    const int layers = static_cast<int>(costs.layers.size());
    std::vector<double> before{0};  // the cost of the layers before each
    for (const double cost : costs.layers) before.push_back(before.back() + cost);
    std::vector<std::optional<Cut>> cuts(static_cast<size_t>(layers) + 1), longer(cuts.size());
    cuts[0] = Cut{};
    for (int stage = 0; stage < stages; ++stage) {
        std::ranges::fill(longer, std::nullopt);
        for (int end = stage + 1; end <= layers - (stages - 1 - stage); ++end)
            for (int first = stage; first < end; ++first) {
                const std::optional<Cut>& of = cuts[static_cast<size_t>(first)];
                if (!of) continue;
                Cut cut = *of;
                const double cost =
                    before[static_cast<size_t>(end)] - before[static_cast<size_t>(first)] +
                    (first == 0 ? costs.embedding : 0) + (stage == stages - 1 ? costs.head : 0);
                cut.costs.insert(std::ranges::upper_bound(cut.costs, cost, std::ranges::greater{}),
                                 cost);
                cut.dealt.push_back(end - first);
                std::optional<Cut>& best = longer[static_cast<size_t>(end)];
                if (!best || cut.costs < best->costs) best = std::move(cut);
            }
        std::swap(cuts, longer);
    }
    return cuts.back()->dealt;
}

}  // namespace

std::vector<int> deal_layers(const LayerCosts& costs, int stages) {
    const auto is_positive = [](double cost) { return cost > 0; };
    assert(stages >= 1 && std::ranges::all_of(costs.layers, is_positive) && costs.embedding >= 0 &&
           costs.head >= 0);
    const auto layers = std::ssize(costs.layers);
    if (layers < stages)
        throw Error("a model of ", layers, " layers cannot be cut into ", stages,
                    " pipeline stages, which need a layer each; lower parallel.pipeline or "
                    "parallel.stages_per_rank");
    const bool are_equal = std::ranges::count(costs.layers, costs.layers.front()) == layers;
    return are_equal ? deal_equal_layers(costs, stages) : deal_any_layers(costs, stages);
}

}  // namespace train_gpt
