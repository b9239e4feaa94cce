// The gradients of attention's sinks, from what a backward pass has left of each row.
#include "device/cuda_queue.h"
#include "kernels/attention/cuda.h"
#include "kernels/attention/sinks.cuh"

namespace train_gpt::cuda {

namespace {

constexpr int sink_threads = 512;

/// One block for each head. Thread i adds up every sink_threads-th row, and then the block adds up
/// the threads' sums: the order is fixed.
__global__ void __launch_bounds__(sink_threads)
    sink_gradient_kernel(const AttentionBackward args, const RowDeltas deltas) {
    const int B = args.shape.B, T = args.shape.T, H = args.shape.H,
              h = static_cast<int>(blockIdx.x);
    const float sink = sink_of(args.sinks, h);
    float sum = 0;
    for (int b = 0; b < B; ++b) {
        const int64_t head = int64_t{b} * H + h;
        const float* const lse = args.lse + head * T;
        const float* const delta = deltas.first + head * deltas.rows * deltas.stride;
#pragma unroll 4
        for (int t = static_cast<int>(threadIdx.x); t < T; t += sink_threads)
            sum += expf(sink - lse[t]) * delta[int64_t{t} * deltas.stride];
    }
    __shared__ float shared[sink_threads / warp_size];
    sum = -deltas.sign * block_sum(sum, shared);
    if (threadIdx.x != 0) return;
    float& to = static_cast<float*>(args.dsinks.data)[h];
    to = args.dsinks.accumulate ? to + sum : sum;
}

}  // namespace

void attention_sink_gradient(Stream& stream, const AttentionBackward& args,
                             const RowDeltas& deltas) {
    sink_gradient_kernel<<<static_cast<unsigned>(args.shape.H), sink_threads, 0,
                           stream_of(stream)>>>(args, deltas);
    CUDA_CHECK_LAUNCH();
}

}  // namespace train_gpt::cuda
