// How many layers each stage of a pipeline has.
#pragma once
#include <vector>

namespace train_gpt {

/// What the parts of a model cost, in any unit: FLOPs per token, or measured seconds. Costs are
/// finite and not negative. The cost of a layer is more than 0.
struct LayerCosts {
    std::vector<double> layers;
    double embedding = 0;  // on the first layer's stage
    double head = 0;       // on the last layer's stage: final norm, head and loss
};

/// Returns how many layers each of `stages` stages has, in order. Each stage has at least one
/// layer. All stages wait for the most expensive one, so the cost of the most expensive stage is
/// the least possible. Then so is the cost of the second most expensive stage, and so on. If
/// several stages could have one more layer, a later stage has it, because earlier stages hold more
/// micro-batches in flight. Throws Error if there are fewer layers than stages.
std::vector<int> deal_layers(const LayerCosts& costs, int stages);

}  // namespace train_gpt
