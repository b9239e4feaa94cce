// Spikes: steps whose loss or gradient norm is far above those of the steps before.
#pragma once
#include <cstdint>

#include "device/stream.h"
#include "kernels/adamw.h"

namespace train_gpt {

/// Losses and norms of the last steps, in a ring.
struct SpikeHistory {
    static constexpr int steps = 128;
    static constexpr double sigmas = 6;

    double losses[steps] = {}, norms[steps] = {};
    int64_t count = 0;   // steps so far; the next one takes place count mod steps
    int64_t spikes = 0;  // so far
    // Mean and standard deviation before the last spike
    double loss_mean = 0, loss_sigma = 0, norm_mean = 0, norm_sigma = 0;
};

/// A step is a spike if its loss, or its norm, is above the mean + 6 σ of the last 128 steps. There
/// must have been so many. The history takes the step, with at most that bound, so that a level
/// that stays is no spike for long. A step that stops the run, overflows or is not finite is none,
/// and is not taken.
struct SpikeWatch {
    SpikeHistory* history = nullptr;
    StepState* state = nullptr;    // with the step's norm; receives spike and spikes
    const double* loss = nullptr;  // sum over the step
    double scale = 1;              // the step's loss is scale · *loss
    bool skips = false;            // AdamW changes nothing at a spike
};
void watch_for_spike(Stream& stream, const SpikeWatch& watch);

/// to[i] = from[i] for i < n, if the step is a spike.
void keep_at_spike(Stream& stream, const StepState* state, double* to, const double* from,
                   int64_t n);

namespace cuda {  // spikes.cu
void watch_for_spike(Stream& stream, const SpikeWatch& watch);
void keep_at_spike(Stream& stream, const StepState* state, double* to, const double* from,
                   int64_t n);
}  // namespace cuda

}  // namespace train_gpt
