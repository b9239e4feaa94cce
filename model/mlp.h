// The feed-forward part of a block: down(hidden(up(norm(x)))), where hidden is gelu, relu², or
// silu(gate) ⊙ up of both halves. Lists of its activations and gradients, its passes, and the
// scratch memory that the passes need.
#pragma once
#include "model/block_pass.h"

namespace train_gpt {

Activations mlp_activations(const LayerSpec& layer, DType dtype);
PartGradients mlp_gradients(const LayerSpec& layer);

/// Computes preact and hidden from the stream's norm.
void mlp_forward(Stream& stream, const Block& block);
/// Adds hidden·wᵀ of the projection `down` to the stream, whose sum is `out`.
Addends add_mlp(Stream& stream, const Block& block, Tensor out);

/// The backward pass from the stream's gradient to the gradient of the norm's output, g.dy, and to
/// weights.
void mlp_backward(const BackwardPass& pass);

/// The scratch memory of these passes for `rows` tokens.
size_t mlp_scratch_bytes(const Stream& stream, const LayerSpec& layer, DType dtype, int64_t rows);

}  // namespace train_gpt
