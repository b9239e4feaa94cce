// Warns of a layer whose router sends nearly all tokens to few of its experts.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "training/config/config.h"
#include "training/watch/router_figures.h"

namespace train_gpt {

/// The effective number of a layer's experts (RouterFigures::effective) is E if all are equally
/// busy and k if all tokens go to the same k experts. The layer has collapsed when the number has
/// been below the middle of k and E in 50 steps in a row: an uneven load within some steps is
/// normal, also at the start of a run, but experts that get few tokens learn little and are chosen
/// even less. The effective number also falls where experts get a few tokens each; a share of
/// experts that are never chosen would not. The layer has recovered when the number has not been
/// below the middle in 50 steps in a row.
class CollapseWatch {
  public:
    /// layers: the layer of each router; experts_per_token: k.
    CollapseWatch(std::vector<int> layers, int experts_per_token, const Config& config);

    /// Takes each step. Returns a line about the layers that have collapsed with this step; empty
    /// if there are none. Steps with fewer than four choices for each expert on average say
    /// nothing.
    std::string add(int64_t step, const RouterReport& report);

    static constexpr int64_t steps = 50, least_mean_load = 4;

  private:
    struct OfLayer {
        int64_t in_a_row = 0;  // steps that disagree with `collapsed`
        bool collapsed = false;
    };

    std::vector<int> layers_;
    int k_;
    std::string advice_;
    std::vector<OfLayer> states_;
};

}  // namespace train_gpt
