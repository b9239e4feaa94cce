// A lower bound of the memory that a run needs. It takes no more than sums over layers, so that a
// search may ask it for thousands of meshes before memory is counted (plan_memory).
#pragma once
#include <array>
#include <iterator>
#include <vector>

#include "model/recompute.h"
#include "training/config/layout.h"

namespace train_gpt {

class LeastMemory {
  public:
    /// For this model, optimizer and dtype on any mesh. shape.whole must be set.
    explicit LeastMemory(const RunShape& shape);

    /// Less than the bytes of the pipeline rank that needs the most. Counts the rank's weights,
    /// masters, slots of the optimizer and sums of gradients, and the activations that its blocks
    /// keep. layers: layers_of_stages(shape).
    double bytes(const RunShape& shape, const std::vector<int>& layers) const;

  private:
    /// Parameters, and the bytes of their masters and of the optimizer's slots.
    struct State {
        double parameters = 0, bytes = 0;

        State& operator+=(const State& other);
    };

    std::vector<State> layers_;
    /// Of each layer and level of recomputation: bytes that it keeps of each token, its input
    /// aside (block.h).
    std::vector<std::array<double, std::size(recompute_levels)>> kept_;
    State embedding_, end_;  // end_: the final norm, and a head of its own
    State tied_;             // what the last rank of a pipeline holds again for a tied head
};

}  // namespace train_gpt
