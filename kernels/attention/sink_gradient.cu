// The gradients of attention's sinks, from what a backward pass has left of each row.
#include "device/cuda_queue.h"
#include "kernels/attention/cuda.h"
#include "kernels/attention/sinks.cuh"

namespace train_gpt::cuda {

namespace {

constexpr int sink_threads = 512;

/// Σ dout ⊙ out of a row, from memory or computed again, with the bits of the tensor cores'
/// kernels.
__device__ __forceinline__ float delta_of(const RowDeltas& deltas, const AttentionBackward& args,
                                          int b, int h, int t) {
    if (deltas.first)
        return deltas.first[((int64_t{b} * args.shape.H + h) * deltas.rows + t) * deltas.stride];
    const auto row = [&](const HeadsView& view) {
        return static_cast<const __nv_bfloat16*>(view.data) + b * view.batch + h * view.head +
               t * view.token;
    };
    const __nv_bfloat16 *const out = row(args.out), *const dout = row(args.dout);
    float delta = 0;
    for (int d = 0; d < args.shape.D; d += 8) {
        const auto o = Pack<__nv_bfloat16>::load(out + d), g = Pack<__nv_bfloat16>::load(dout + d);
#pragma unroll
        for (int i = 0; i < 8; ++i) delta += to_float(o[i]) * to_float(g[i]);
    }
    return delta;
}

/// One block for each head. Thread i adds up every sink_threads-th row, and then the block adds up
/// the threads' sums: the order is fixed.
__global__ void __launch_bounds__(sink_threads)
    sink_gradient_kernel(const AttentionBackward args, const RowDeltas deltas) {
    const int B = args.shape.B, T = args.shape.T, H = args.shape.H,
              h = static_cast<int>(blockIdx.x);
    const float sink = sink_of(args.sinks, h);
    float sum = 0;
    for (int b = 0; b < B; ++b) {
        const float* const lse = args.lse + (int64_t{b} * H + h) * T;
#pragma unroll 4
        for (int t = static_cast<int>(threadIdx.x); t < T; t += sink_threads)
            sum += expf(sink - lse[t]) * delta_of(deltas, args, b, h, t);
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

void attention_sink_gradient(Stream& stream, const AttentionBackward& args) {
    attention_sink_gradient(stream, args, {.sign = 1});
}

}  // namespace train_gpt::cuda
