// One pre-LayerNorm transformer block over M = B·T tokens:
//   x_mid = x + c_proj(attention(c_attn(ln_1(x))))
//   x_out = x_mid + c_proj(gelu(c_fc(ln_2(x_mid))))
// The forward pass is split into the halves before and after attention, because training attends
// within a batch and sampling attends to a cache.
#pragma once
#include <functional>

#include "device/device.h"
#include "device/memory.h"
#include "kernels/attention/attention.h"
#include "model/recompute.h"
#include "parallel/parameters.h"

namespace train_gpt {

/// Indices of a block's parameters in the store.
struct BlockParameters {
    int ln1_w, ln1_b, qkv_w, qkv_b, proj_w, proj_b, ln2_w, ln2_b, fc_w, fc_b, fcproj_w, fcproj_b;

    static BlockParameters find(const ParameterStore& parameters, int layer);
};

/// The activations of a block; x is its input, the residual stream. All are [M, …] in the compute
/// dtype, except stats1, stats2 [M, 2] and lse [B, H, T], which are fp32.
struct BlockActivations {
    Tensor x, ln1, stats1, qkv, att, lse, x_mid, ln2, stats2, preact, gelu;
};

/// Gradients in the backward pass, shared by all blocks: dres of the residual stream and dy are
/// [M, C], dwide is [M, 4·C].
struct BlockGradients {
    Tensor dres, dy, dwide;
};

/// q (part 0), k (1) or v (2) of a packed [B, T, 3, H, D] tensor.
HeadsView packed_view(Tensor qkv, int part, int T, int H, int D);
/// [B, T, H, D]
HeadsView plain_view(Tensor x, int T, int H, int D);

/// Computes ln1, stats1 and qkv from x.
void block_before_attention(Stream& stream, const ParameterStore& parameters,
                            const BlockParameters& p, const BlockActivations& a);
/// Computes x_mid … gelu from att and x, and out [M, C], the next block's x. out is absent in
/// recomputation, which does not need it.
void block_after_attention(Stream& stream, const ParameterStore& parameters,
                           const BlockParameters& p, const BlockActivations& a, Tensor out);
/// Both halves, with causal attention within the batch.
void block_forward(Stream& stream, const ParameterStore& parameters, const BlockParameters& p,
                   const BlockActivations& a, const AttentionShape& attention, Tensor out);

/// g.dres holds the gradient of the block's output and receives the gradient of its input. The
/// layer norm after this block has already written the bias gradient of its MLP's c_proj; likewise,
/// this block's ln_1 writes that of the previous block to bias_before.
void block_backward(Stream& stream, const ParameterStore& parameters, const BlockParameters& p,
                    const BlockActivations& a, const BlockGradients& g,
                    const AttentionShape& attention, Recompute recompute, GradientSink bias_before);

}  // namespace train_gpt
