// One pre-LayerNorm transformer block over M = B·T tokens:
//   x_mid = x + c_proj(attention(c_attn(ln_1(x))))      x_out = x_mid +
//   c_proj(gelu(c_fc(ln_2(x_mid))))
// Its forward pass comes in the two halves around attention, because training attends inside a
// batch and sampling to a cache.
#pragma once
#include <functional>

#include "device/device.h"
#include "device/memory.h"
#include "kernels/attention/attention.h"
#include "model/recompute.h"
#include "parallel/parameters.h"

namespace train_gpt {

/// Indices of a block's parameters in the store, in registry order.
struct BlockParameters {
    int ln1_w, ln1_b, qkv_w, qkv_b, proj_w, proj_b, ln2_w, ln2_b, fc_w, fc_b, fcproj_w, fcproj_b;

    static BlockParameters find(const ParameterStore& parameters, int layer);
};

/// What a block computes on its way; x is the residual stream that goes in. All [M, …] in the
/// compute dtype but the fp32 stats1, stats2 [M, 2] and lse [B, H, T].
struct BlockActivations {
    Tensor x, ln1, stats1, qkv, att, lse, x_mid, ln2, stats2, preact, gelu;
};

/// Gradients on their way down, shared by all blocks: dres of the residual stream and dy [M, C],
/// dwide [M, 4·C].
struct BlockGradients {
    Tensor dres, dy, dwide;
};

/// q (part 0), k (1) or v (2) of a packed [B, T, 3, H, D] tensor.
HeadsView packed_view(Tensor qkv, int part, int T, int H, int D);
/// [B, T, H, D]
HeadsView plain_view(Tensor x, int T, int H, int D);

/// ln1, stats1 and qkv from x.
void block_before_attention(Stream& stream, const ParameterStore& parameters,
                            const BlockParameters& p, const BlockActivations& a);
/// x_mid … gelu from att and x, and out [M, C], the next block's x (absent: not needed, in
/// recomputation).
void block_after_attention(Stream& stream, const ParameterStore& parameters,
                           const BlockParameters& p, const BlockActivations& a, Tensor out);
/// Both halves with causal attention inside the batch.
void block_forward(Stream& stream, const ParameterStore& parameters, const BlockParameters& p,
                   const BlockActivations& a, const AttentionShape& attention, Tensor out);

/// g.dres holds the gradient of the block's output and receives that of its input. The bias
/// gradient of the MLP's c_proj came from the layer norm behind the block; this block's first norm
/// writes that of the block before into bias_before.
void block_backward(Stream& stream, const ParameterStore& parameters, const BlockParameters& p,
                    const BlockActivations& a, const BlockGradients& g,
                    const AttentionShape& attention, Recompute recompute, GradientSink bias_before);

}  // namespace train_gpt
