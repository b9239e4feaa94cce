// One pre-norm transformer block over M = B·T tokens:
//   x_mid = x + out(attention(qkv(norm1(x))))        attention_layer.h
//   x_out = x_mid + down(hidden(up(norm2(x_mid))))   mlp.h, or experts in its place: expert_layer.h
// A block composes these parts on the residual stream (residual_stream.h). It knows nothing of the
// blocks before and after it.
#pragma once
#include "model/attention_layer.h"
#include "model/block_pass.h"
#include "model/expert_layer.h"
#include "model/mlp.h"

namespace train_gpt {

/// The activations of all parts of a block, and of the norms between them, except x.
Activations block_activations(const LayerSpec& layer, DType dtype);
/// The gradients of all parts of a block, in the order of the backward pass.
PartGradients block_gradients(const LayerSpec& layer);
/// Memory that layers [first, last) can share: each activation that one of these layers has, with
/// the largest number of elements (each · width).
Activations widest_activations(const DecoderSpec& spec, int first, int last, DType dtype);

/// Computes x_mid … hidden from x, and out [M, C], the next block's x. Among tensor-parallel ranks
/// the returned Addends are not in `out` yet. In recomputation `out` is absent.
Addends block_forward(Stream& stream, const Block& block, Tensor out,
                      const Attend& attend = attend_within_batch);

/// g.dres holds the gradient of the block's output and, unless only gradients of weights are
/// computed, receives the gradient of the block's input. Weight gradients go to the sinks of
/// `gradients`.
void block_backward(Stream& stream, Gradients& gradients, const Block& block,
                    const BlockGradients& g, Recompute recompute, Backward part = Backward::both);

/// The scratch memory of these passes for `rows` tokens of so many sequences. Attention itself is
/// not counted.
size_t block_scratch_bytes(const Stream& stream, const LayerSpec& layer, DType dtype, int64_t rows,
                           int64_t sequences);

}  // namespace train_gpt
