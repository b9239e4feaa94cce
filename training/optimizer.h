// AdamW over all parameters of a store: global gradient norm, clipping, update, each in one pass.
#pragma once
#include <string>
#include <vector>

#include "kernels/adamw.h"
#include "parallel/parameters.h"

namespace train_gpt {

class Optimizer {
  public:
    Optimizer(ParameterStore& parameters, Arena& arena);

    /// One update from the gradient sums in the store. scale: 1 / valid target tokens of the step; clip: largest global norm of
    /// the scaled gradient, 0 for none. args.state is filled in. When the norm is not finite nothing changes, now and
    /// in all later calls.
    void update(Stream& stream, AdamWStep args, float scale, float clip);

    /// What the last update decided, in the device's memory.
    const StepState* state_on_device() const { return state_; }
    /// The same for the host, behind all work on the device.
    StepState state() const;
    /// Name of the first parameter whose gradient was not finite.
    std::string bad_parameter(const StepState& state) const;

  private:
    ParameterStore& parameters_;
    Device device_;
    std::vector<NormSegment> norm_segments_;
    std::vector<AdamWSegment> adamw_segments_;
    std::vector<int64_t> partial_counts_;
    double* partials_ = nullptr;
    StepState* state_ = nullptr;
};

}  // namespace train_gpt
