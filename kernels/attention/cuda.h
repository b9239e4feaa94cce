// The two CUDA implementations of attention; attention.cu chooses between them.
#pragma once
#include <optional>

#include "kernels/attention/attention.h"

namespace train_gpt::cuda {

/// Σ dout ⊙ out of the rows of a backward pass, where our own kernels have left them in the
/// stream's scratch memory: sign times the element of row (b, h, t), which is first[((b·H + h)·rows
/// + t)·stride]. The backward passes below return them and leave dsinks alone.
struct RowDeltas {
    const float* first = nullptr;
    int stride = 0, rows = 0;
    float sign = 0;
};

/// On tensor cores: tile_forward.cu and tile_backward.cu. dtype bf16, D % 8 == 0, D <= 128, scale >
/// 0; all views start at multiples of 16 bytes and their strides are multiples of 8 elements.
void attention_forward_tiled(Stream& stream, const AttentionForward& args);
RowDeltas attention_backward_tiled(Stream& stream, const AttentionBackward& args);
size_t attention_backward_tiled_scratch_bytes(const AttentionShape& shape);

/// With wgmma and the tensor copy engine: wgmma_forward.cu and wgmma_backward.cu. For what the
/// tensor cores' kernels above take, on GPUs of sm_90. False or nothing, and nothing submitted,
/// where a tensor map cannot be made or the build has no code for sm_90a.
bool attention_forward_wgmma(Stream& stream, const AttentionForward& args);
std::optional<RowDeltas> attention_backward_wgmma(Stream& stream, const AttentionBackward& args);
size_t attention_backward_wgmma_scratch_bytes(const AttentionShape& shape);

/// For all arguments that the contract allows: general_forward.cu and general_backward.cu.
void attention_forward_general(Stream& stream, const AttentionForward& args);
RowDeltas attention_backward_general(Stream& stream, const AttentionBackward& args);
size_t attention_backward_general_scratch_bytes(const AttentionShape& shape);

/// args.dsinks: sink_gradient.cu. Without deltas, they are computed again: views as for the tensor
/// cores' kernels.
void attention_sink_gradient(Stream& stream, const AttentionBackward& args,
                             const RowDeltas& deltas);
void attention_sink_gradient(Stream& stream, const AttentionBackward& args);

}  // namespace train_gpt::cuda
