// AdamW over this rank's share of a store's parameters: global gradient norm, clipping and update,
// each in one pass.
#pragma once
#include <string>
#include <vector>

#include "kernels/adamw.h"
#include "parallel/state/parameters.h"

namespace train_gpt {

/// What the optimizer keeps of each element: AdamW's two moments. A store is made with these slots.
std::vector<OptimizerSlot> optimizer_slots();

class Optimizer {
  public:
    /// sums: how many other sums over a step the ranks add up in the same exchange as the norm.
    /// names: of all tensors of a model of which pipeline ranks hold parts, by Parameter::id; empty:
    /// the store has them all.
    Optimizer(ParameterStore& parameters, Arena& arena, int64_t sums = 0,
              std::vector<std::string> names = {});

    /// This rank's sums over a step [sums], in the device's memory; its kernels add to them.
    double* sums_of_rank() { return sums_of_rank_; }
    /// The sums over all ranks [sums], after update().
    const double* sums() const { return sums_; }
    size_t sums_bytes() const { return static_cast<size_t>(sums_count_) * sizeof(double); }

    /// One update from the gradient sums in the store. scale: 1 / valid target tokens of the step;
    /// clip: the largest global norm of the scaled gradient, 0: no clipping. args.state is filled
    /// in. If the norm is not finite, nothing changes, in this call and all later ones. After the
    /// update the ranks gather the weights that each has updated.
    void update(Stream& stream, AdamWStep args, float scale, float clip);

    /// What the last update decided, in the device's memory; the same on all ranks.
    const StepState* state_on_device() const { return state_; }
    /// The same for the host, after all work on the device.
    StepState state() const;
    /// Name of the first parameter whose gradient was not finite.
    std::string bad_parameter(const StepState& state) const;

  private:
    void make_segments();
    size_t place_of(int parameter) const;  // among `names_`

    ParameterStore& parameters_;
    Device device_;
    // Of each bucket.
    std::vector<std::vector<NormSegment>> norm_segments_;
    std::vector<std::vector<AdamWSegment>> adamw_segments_;
    std::vector<std::string> names_;
    bool by_id_;  // names_ are those of a whole model, and the store has a part
    int64_t sums_count_, tensors_;
    // Blocks of the gradients whose norm this rank counts, tensor by tensor.
    double* partials_ = nullptr;
    std::vector<int64_t> partial_counts_;  // of each tensor
    // Sums of the step, then one of each tensor: of this rank, of each rank, of all ranks.
    double *sums_of_rank_ = nullptr, *gathered_ = nullptr, *sums_ = nullptr;
    StepState* state_ = nullptr;
};

}  // namespace train_gpt
