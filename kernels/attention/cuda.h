// The two CUDA implementations of attention; attention.cu chooses between them.
#pragma once
#include "kernels/attention/attention.h"

namespace train_gpt::cuda {

/// On tensor cores: tile_forward.cu and tile_backward.cu. dtype bf16, D % 8 == 0, D <= 128, scale >
/// 0; all views start at multiples of 16 bytes and their strides are multiples of 8 elements.
void attention_forward_tiled(Stream& stream, const AttentionForward& args);
void attention_backward_tiled(Stream& stream, const AttentionBackward& args);
size_t attention_backward_tiled_scratch_bytes(const AttentionShape& shape);

/// For all arguments that the contract allows: general_forward.cu and general_backward.cu.
void attention_forward_general(Stream& stream, const AttentionForward& args);
void attention_backward_general(Stream& stream, const AttentionBackward& args);
size_t attention_backward_general_scratch_bytes(const AttentionShape& shape);

/// Σ dout ⊙ out of the rows of a backward pass, as it has left them: sign times the element of row
/// (b, h, t), which is first[((b·H + h)·rows + t)·stride].
struct RowDeltas {
    const float* first;
    int stride, rows;
    float sign;
};
/// args.dsinks: sink_gradient.cu.
void attention_sink_gradient(Stream& stream, const AttentionBackward& args,
                             const RowDeltas& deltas);

}  // namespace train_gpt::cuda
