#include "parallel/pipeline/stage_layers.h"

#include <cassert>
#include <cstdint>

#include "base/error.h"

namespace train_gpt {

std::vector<int> deal_layers(int layers, int stages, const LayerCosts& costs) {
    assert(stages >= 1 && costs.layer > 0 && costs.embedding >= 0 && costs.head >= 0);
    if (layers < stages)
        throw Error("a model of ", layers, " layers cannot be cut into ", stages,
                    " pipeline stages, which need a layer each; lower parallel.pipeline or "
                    "parallel.stages_per_rank");
    const auto n = static_cast<size_t>(stages);
    std::vector<int> dealt(n, 1);
    const auto cost_with_one_more = [&](size_t stage) {
        return (dealt[stage] + 1) * costs.layer + (stage == 0 ? costs.embedding : 0) +
               (stage == n - 1 ? costs.head : 0);
    };
    // Layers cost the same, so each may simply go where it costs least.
    for (int left = layers - stages; left > 0; --left) {
        size_t cheapest = n - 1;
        for (size_t stage = n - 1; stage-- > 0;)
            if (cost_with_one_more(stage) < cost_with_one_more(cheapest)) cheapest = stage;
        ++dealt[cheapest];
    }
    return dealt;
}

void check_layers_per_stage(std::span<const int> layers_per_stage, int layers, int stages) {
    if (layers_per_stage.size() != static_cast<size_t>(stages))
        throw Error("parallel.layers_per_stage has ", layers_per_stage.size(),
                    " numbers, but the pipeline has ", stages,
                    " stages (parallel.pipeline · parallel.stages_per_rank); give one for each");
    int64_t sum = 0;
    for (size_t stage = 0; stage < layers_per_stage.size(); ++stage) {
        if (layers_per_stage[stage] < 1)
            throw Error("parallel.layers_per_stage gives stage ", stage, " ",
                        layers_per_stage[stage], " layers; each stage needs at least 1");
        sum += layers_per_stage[stage];
    }
    if (sum != layers)
        throw Error("parallel.layers_per_stage adds up to ", sum, " layers, but the model has ",
                    layers, "; change its numbers or model.n_layer");
}

}  // namespace train_gpt
