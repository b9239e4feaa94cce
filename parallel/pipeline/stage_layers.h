// How many layers each stage of a pipeline has.
#pragma once
#include <span>
#include <vector>

namespace train_gpt {

/// What parts of a model cost, in any unit: FLOPs per token, or measured seconds. Finite, not
/// negative, and more than 0 for a layer.
struct LayerCosts {
    std::vector<double> layers;
    double embedding = 0;  // with the first layer
    double head = 0;       // with the last: final norm, head and loss
};

/// How many of the layers each of `stages` stages has, in order; each stage has at least one. The cost
/// of the most expensive stage, which all others wait for, is the least possible, and so is the cost of
/// the second, and so on. Where several stages could have a layer more, later ones have it: earlier ones
/// hold more micro-batches in flight. Throws Error if there are fewer layers than stages.
std::vector<int> deal_layers(const LayerCosts& costs, int stages);

/// Checks parallel.layers_per_stage. Throws Error if it has not one element for each stage, an
/// element below 1, or another sum than `layers`.
void check_layers_per_stage(std::span<const int> layers_per_stage, int layers, int stages);

}  // namespace train_gpt
