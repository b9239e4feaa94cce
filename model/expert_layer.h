// A mixture of experts as the feed-forward part of a block. A router sends each token to k of E
// SwiGLU MLPs and weights their outputs. A shared expert may take all tokens as well. Without a
// capacity (ExpertSpec) every token keeps all its experts: R = M·k rows are computed. With a
// capacity, training computes fewer. Lists of the part's activations and gradients, its passes, and
// the scratch memory that the passes need. Shazeer et al., arXiv 1701.06538; without drops: Gale et
// al. (MegaBlocks), arXiv 2211.15841.
#pragma once
#include "model/block_pass.h"

namespace train_gpt {

Activations expert_activations(const LayerSpec& layer, DType dtype);
PartGradients expert_gradients(const LayerSpec& layer);

/// Adds the layer's output to the stream, whose sum is `out`. In recomputation, where `out` is
/// absent, tokens keep their experts.
///
/// Tensor-parallel ranks have some of the hidden values of every expert. They all route all tokens.
Addends expert_layer_forward(Stream& stream, const Block& block, Tensor out);

/// The backward pass from the stream's gradient to the gradient of the norm's output, g.dy, and to
/// weights.
void expert_layer_backward(const BackwardPass& pass);

/// The scratch memory of these passes for `rows` tokens of so many sequences.
size_t expert_layer_scratch_bytes(const Stream& stream, const LayerSpec& layer, DType dtype,
                                  int64_t rows, int64_t sequences);

}  // namespace train_gpt
