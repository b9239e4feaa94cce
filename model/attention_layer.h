// The attention part of a block: out(attention(qkv(norm(x)))), with q and k rotated where positions
// are rotary. Lists of its activations and gradients, its passes, and the scratch memory that the
// passes need.
#pragma once
#include <functional>

#include "model/block_pass.h"

namespace train_gpt {

/// Heads first … of a packed tensor [B, T, heads, D].
HeadsView heads_view(Tensor packed, int first, int T, int D);

/// The RopeShape of B·T tokens of a layer.
RopeShape rope_shape(const LayerSpec& layer, DType dtype, int B, int T);
/// The AttentionShape of B sequences of T tokens, which attend to S.
AttentionShape attention_shape(const LayerSpec& layer, DType dtype, int B, int T, int S);

Activations attention_activations(const LayerSpec& layer, DType dtype);
PartGradients attention_gradients(const LayerSpec& layer);

/// How the part attends: from qkv, or rotated, into att.
using Attend = std::function<void(Stream&, const Block&)>;
/// Causally within each sequence of the batch.
void attend_within_batch(Stream& stream, const Block& block);

/// Computes att from the stream's norm.
void attention_layer_forward(Stream& stream, const Block& block, const Attend& attend);
/// Adds att·wᵀ of the output projection to the stream.
Addends add_attention(Stream& stream, const Block& block);

/// The backward pass from the stream's gradient to the gradient of the norm's output, g.dy, and to
/// weights.
void attention_layer_backward(const BackwardPass& pass);

/// The scratch memory of these passes for `rows` tokens. Attention itself is not counted.
size_t attention_layer_scratch_bytes(const Stream& stream, const LayerSpec& layer, DType dtype,
                                     int64_t rows);

}  // namespace train_gpt
