#include <cmath>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/spikes.h"

namespace train_gpt::cuda {

namespace {

constexpr int threads = 256;

/// Sums over the ring, of which each of the first threads has one number. All threads get it.
__device__ double ring_sum(double x) {
    __shared__ double shared[SpikeHistory::steps / warp_size];
    const double sum = block_sum(x, shared);
    __shared__ double result;
    if (threadIdx.x == 0) result = sum;
    __syncthreads();
    const double all = result;
    __syncthreads();
    return all;
}

struct Statistics {
    double mean, sigma;
};
__device__ Statistics statistics(const double* ring) {
    const double x = ring[threadIdx.x];
    const double mean = ring_sum(x) / SpikeHistory::steps;
    return {mean, sqrt(ring_sum((x - mean) * (x - mean)) / SpikeHistory::steps)};
}

/// One block, a thread for each place of the ring.
__global__ void __launch_bounds__(SpikeHistory::steps) watch_step(const SpikeWatch watch) {
    SpikeHistory& history = *watch.history;
    StepState& state = *watch.state;
    const double loss = watch.scale * *watch.loss, norm = static_cast<double>(state.norm);
    const Statistics of_loss = statistics(history.losses), of_norm = statistics(history.norms);
    if (threadIdx.x > 0) return;
    state.spike = state.skip = state.taken = 0;
    state.spikes = history.spikes;
    if (state.stop || state.overflow || !isfinite(loss) || !isfinite(norm)) return;
    double loss_bound = loss, norm_bound = norm;
    if (history.count >= SpikeHistory::steps) {
        loss_bound = of_loss.mean + SpikeHistory::sigmas * of_loss.sigma;
        norm_bound = of_norm.mean + SpikeHistory::sigmas * of_norm.sigma;
    }
    const int64_t place = history.count++ % SpikeHistory::steps;
    history.losses[place] = fmin(loss, loss_bound);
    history.norms[place] = fmin(norm, norm_bound);
    state.taken = 1;
    if (loss <= loss_bound && norm <= norm_bound) return;
    state.spikes = ++history.spikes;
    history.before[state.spikes % 2] = {of_loss.mean, of_loss.sigma, of_norm.mean, of_norm.sigma};
    state.spike = 1;
    state.skip = watch.skips ? 1 : 0;
}

__global__ void __launch_bounds__(threads)
    keep_spike(const StepState* state, const SpikeKeep keep) {
    const int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x;
    if (i < keep.n && state->spike) keep.to[state->spikes % 2 * keep.stride + i] = keep.from[i];
}

__global__ void __launch_bounds__(threads)
    keep_taken(const StepState* state, double* to, const double* from, int64_t n) {
    const int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x;
    if (i < n && state->taken) to[i] = from[i];
}

unsigned blocks_of(int64_t n) { return static_cast<unsigned>(ceil_div(n, int64_t{threads})); }

}  // namespace

void watch_for_spike(Stream& stream, const SpikeWatch& watch) {
    watch_step<<<1, SpikeHistory::steps, 0, stream_of(stream)>>>(watch);
    CUDA_CHECK_LAUNCH();
}

void keep_at_spike(Stream& stream, const StepState* state, const SpikeKeep& keep) {
    if (keep.n == 0) return;
    keep_spike<<<blocks_of(keep.n), threads, 0, stream_of(stream)>>>(state, keep);
    CUDA_CHECK_LAUNCH();
}

void keep_if_taken(Stream& stream, const StepState* state, double* to, const double* from,
                   int64_t n) {
    if (n == 0) return;
    keep_taken<<<blocks_of(n), threads, 0, stream_of(stream)>>>(state, to, from, n);
    CUDA_CHECK_LAUNCH();
}

}  // namespace train_gpt::cuda
