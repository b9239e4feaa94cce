// About how long a step takes: what fit_into() compares.
#pragma once
#include <cstdint>

#include "device/device.h"
#include "training/config/layout.h"

namespace train_gpt {

/// What the time of a step depends on, beside the run's shape.
struct Speeds {
    double flops = 0;  // per second, of products of large matrices
    double link = 0;   // bytes per second that a rank sends along the data axis
    double host = 0;   // bytes per second between a GPU and its host, in each direction
};

/// How many of a rank's layers get their inputs back from the host: all but the last three, whose
/// inputs are still on the device. In a pipeline other micro-batches pass in between: all layers.
double layers_from_host(const RunShape& shape);

/// The time of a step on its busiest rank: in seconds, or without speeds in units of a token.
///
///   micro-batch of n tokens   the time of n + 64 tokens (n + 1,024 on a GPU), × 1.04 if
///                             element-wise results are recomputed, × 1.33 if blocks are;
///                             the rank's micro-batches of a step, and those for which it waits
///                             in a pipeline (idle_micro_batches)
///   token                     its FLOPs / (0.5 · speeds.flops), × 0.85 on a GPU with fp8
///   weights and gradients     the bytes that state_bytes() counts / speeds.link, on a GPU without
///                             85 % of what is hidden. As much is hidden as 80 % of a micro-batch,
///                             or with stages 2 and 3, which send in every one, of the step
///   offloaded state           its bytes / speeds.host
///   offloaded activations     the bytes of all layers' to the host and of layers_from_host() back
///                             / speeds.host, without what is hidden: 80 % of the step
class StepTime {
  public:
    StepTime(const RunShape& shape, const Device& device, const Speeds& speeds);

    /// offloaded_state: bytes of the optimizer's state in the host's memory.
    double of(const RunShape& shape, int64_t offloaded_state) const;

  private:
    double exposed(const RunShape& shape, double beside) const;
    double offloaded(const RunShape& shape, int64_t state, double compute,
                     int64_t micro_batches) const;

    Speeds speeds_;
    double token_ = 1, fixed_tokens_, hides_;
};

}  // namespace train_gpt
