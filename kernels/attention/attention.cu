// Attention on CUDA: chooses between the tensor-core kernels, the general kernels and cuDNN.
// attention.cpp has checked the arguments.
#include <algorithm>

#include "device/cuda_queue.h"
#include "kernels/attention/cuda.h"
#include "kernels/attention/engine.h"

namespace train_gpt::cuda {

namespace {

constexpr int largest_tiled_head = 128;

/// With fewer queries than the 16 rows of a tensor-core operand, as in sampling, the general
/// kernels run instead: they divide the keys of one query among many warps.
constexpr int fewest_tiled_queries = 16;

bool can_be_tiled(const AttentionShape& shape, std::initializer_list<HeadsView> views) {
    const auto aligned = [](const HeadsView& view) {
        return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.batch % 8 == 0 &&
               view.token % 8 == 0 && view.head % 8 == 0;
    };
    return shape.dtype == DType::bf16 && shape.D % 8 == 0 && shape.D <= largest_tiled_head &&
           shape.T >= fewest_tiled_queries && shape.scale > 0 &&
           std::ranges::all_of(views, aligned);
}

/// 80, 90, …; of a stream that only plans, too.
int architecture_of(const Device& device) {
    if (device.planned_architecture > 0) return device.planned_architecture;
    int major = 0, minor = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index));
    return 10 * major + minor;
}

bool has_wgmma(const Stream& stream) { return limits_of(stream).architecture == 90; }

}  // namespace

void attention_forward(Stream& stream, const AttentionForward& args) {
    const bool tiled = can_be_tiled(args.shape, {args.q, args.k, args.v, args.out});
    const auto own = [&] {
        if (tiled)
            attention_forward_tiled(stream, args);
        else
            attention_forward_general(stream, args);
    };
    AttentionEngines::Attempt wgmma;
    if (tiled && has_wgmma(stream)) wgmma = [&] { return attention_forward_wgmma(stream, args); };
    stream.queue->kept<AttentionEngines>().forward(stream, args, own, wgmma);
}

void attention_backward(Stream& stream, const AttentionBackward& args) {
    const bool tiled = can_be_tiled(
        args.shape, {args.q, args.k, args.v, args.out, args.dout, args.dq, args.dk, args.dv});
    RowDeltas deltas;
    const auto run_own = [&] {
        deltas = tiled ? attention_backward_tiled(stream, args)
                       : attention_backward_general(stream, args);
    };
    AttentionEngines::Attempt wgmma;
    if (tiled && has_wgmma(stream))
        wgmma = [&] {
            const auto done = attention_backward_wgmma(stream, args);
            if (done) deltas = *done;
            return done.has_value();
        };
    const bool own = stream.queue->kept<AttentionEngines>().backward(stream, args, run_own, wgmma);
    if (!args.dsinks) return;
    if (own)
        attention_sink_gradient(stream, args, deltas);
    else
        attention_sink_gradient(stream, args);
}

size_t attention_scratch_bytes(const Stream& stream, const AttentionShape& shape) {
    return std::max(
        {attention_backward_tiled_scratch_bytes(shape),
         attention_backward_wgmma_scratch_bytes(shape),
         attention_backward_general_scratch_bytes(shape),
         attention_library_scratch_bytes(stream.settings, shape, architecture_of(stream.device))});
}

size_t attention_forward_scratch_bytes(const Stream& stream, const AttentionShape& shape) {
    return attention_library_forward_scratch_bytes(stream.settings, shape);
}

}  // namespace train_gpt::cuda
