// Spikes: steps whose loss or gradient norm is far above the losses or norms of the steps before.
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
    /// Mean and standard deviation before a spike.
    struct Before {
        double loss_mean = 0, loss_sigma = 0, norm_mean = 0, norm_sigma = 0;
    };
    Before before[2];  // the last two spikes; number n has place n mod 2
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

/// If the step is a spike: to[(spikes mod 2)·stride + i] = from[i] for i < n ≤ stride. So what is
/// kept of a spike stays until the next but one.
struct SpikeKeep {
    double* to = nullptr;  // [2, stride]
    int64_t stride = 0;
    const double* from = nullptr;
    int64_t n = 0;
};
void keep_at_spike(Stream& stream, const StepState* state, const SpikeKeep& keep);
/// to[i] = from[i] for i < n, if the history has taken the step.
void keep_if_taken(Stream& stream, const StepState* state, double* to, const double* from,
                   int64_t n);

namespace cuda {  // spikes.cu
void watch_for_spike(Stream& stream, const SpikeWatch& watch);
void keep_at_spike(Stream& stream, const StepState* state, const SpikeKeep& keep);
void keep_if_taken(Stream& stream, const StepState* state, double* to, const double* from,
                   int64_t n);
}  // namespace cuda

}  // namespace train_gpt
