#include "kernels/spikes.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace train_gpt {

namespace {

/// Mean and standard deviation of the whole ring.
std::pair<double, double> statistics(const double (&ring)[SpikeHistory::steps]) {
    double sum = 0, squares = 0;
    for (const double x : ring) sum += x;
    const double mean = sum / SpikeHistory::steps;
    for (const double x : ring) squares += (x - mean) * (x - mean);
    return {mean, std::sqrt(squares / SpikeHistory::steps)};
}

}  // namespace

void watch_for_spike(Stream& stream, const SpikeWatch& watch) {
    TRAIN_GPT_ON_CUDA(stream.device, watch_for_spike(stream, watch));
    SpikeHistory& history = *watch.history;
    StepState& state = *watch.state;
    const double loss = watch.scale * *watch.loss, norm = double{state.norm};
    state.spike = state.skip = state.taken = 0;
    state.spikes = history.spikes;
    if (state.stop || state.overflow || !std::isfinite(loss) || !std::isfinite(norm)) return;
    const auto [loss_mean, loss_sigma] = statistics(history.losses);
    const auto [norm_mean, norm_sigma] = statistics(history.norms);
    double loss_bound = loss, norm_bound = norm;
    if (history.count >= SpikeHistory::steps) {
        loss_bound = loss_mean + SpikeHistory::sigmas * loss_sigma;
        norm_bound = norm_mean + SpikeHistory::sigmas * norm_sigma;
    }
    const auto place = static_cast<size_t>(history.count++ % SpikeHistory::steps);
    history.losses[place] = std::min(loss, loss_bound);
    history.norms[place] = std::min(norm, norm_bound);
    state.taken = 1;
    if (loss <= loss_bound && norm <= norm_bound) return;
    state.spikes = ++history.spikes;
    history.before[state.spikes % 2] = {loss_mean, loss_sigma, norm_mean, norm_sigma};
    state.spike = 1;
    state.skip = watch.skips ? 1 : 0;
}

void keep_at_spike(Stream& stream, const StepState* state, const SpikeKeep& keep) {
    TRAIN_GPT_ON_CUDA(stream.device, keep_at_spike(stream, state, keep));
    if (state->spike) std::copy_n(keep.from, keep.n, keep.to + state->spikes % 2 * keep.stride);
}

void keep_if_taken(Stream& stream, const StepState* state, double* to, const double* from,
                   int64_t n) {
    TRAIN_GPT_ON_CUDA(stream.device, keep_if_taken(stream, state, to, from, n));
    if (state->taken) std::copy_n(from, n, to);
}

}  // namespace train_gpt
