// AdamW over the parameters of a store that are this rank's: global gradient norm, clipping, update, each in one pass.
#pragma once
#include <string>
#include <vector>

#include "dataloader/mixture.h"
#include "kernels/adamw.h"
#include "parallel/parameters.h"

namespace train_gpt {

class Optimizer {
  public:
    /// sources: of training data.
    Optimizer(ParameterStore& parameters, Arena& arena, int sources = 1);

    /// Sums of this rank over a step, in the device's memory, which the ranks add up with the norm:
    /// of losses (nats), of whether this rank wants the run to stop behind this step, and where
    /// training data come from several sources of the losses of each. Of the last the device holds
    /// as many as there are sources.
    struct StepSums {
        double loss = 0, stop_requests = 0;
        double loss_of_source[Mixture::max_sources] = {};
    };
    /// What the device holds of StepSums.
    size_t sums_bytes() const { return static_cast<size_t>(sums_count_) * sizeof(double); }
    StepSums* sums_of_rank() { return sums_of_rank_; }
    /// The same of all ranks, behind update().
    const StepSums* sums() const { return sums_; }

    /// One update from the gradient sums in the store. scale: 1 / valid target tokens of the step; clip: largest global norm of
    /// the scaled gradient, 0 for none. args.state is filled in. When the norm is not finite nothing changes, now and
    /// in all later calls. Behind it the ranks gather the weights that each has updated.
    void update(Stream& stream, AdamWStep args, float scale, float clip);

    /// What the last update decided, in the device's memory; the same on all ranks.
    const StepState* state_on_device() const { return state_; }
    /// The same for the host, behind all work on the device.
    StepState state() const;
    /// Name of the first parameter whose gradient was not finite.
    std::string bad_parameter(const StepState& state) const;

  private:
    double* partials_behind(StepSums* sums) const;

    ParameterStore& parameters_;
    Device device_;
    // Of each bucket.
    std::vector<std::vector<NormSegment>> norm_segments_;
    std::vector<std::vector<AdamWSegment>> adamw_segments_;
    std::vector<int64_t> partial_counts_;  // of each parameter
    int64_t sums_count_;
    // Each followed by the norm's partials, in the registry's order: this rank's, zero where another rank's are; all ranks'.
    StepSums *sums_of_rank_ = nullptr, *sums_ = nullptr;
    int64_t partials_ = 0;
    StepState* state_ = nullptr;
};

}  // namespace train_gpt
