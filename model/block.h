// One pre-norm transformer block over M = B·T tokens:
//   x_mid = x + out(attention(qkv(norm1(x))))        q and k rotated, where positions are rotary
//   x_out = x_mid + down(hidden(up(norm2(x_mid))))   hidden: gelu, or silu(gate) ⊙ up of both halves
// The forward pass is split into the halves before and after attention, because training attends
// within a batch and sampling attends to a cache. A block knows nothing of those before and after it.
#pragma once
#include "device/device.h"
#include "device/memory.h"
#include "kernels/attention/attention.h"
#include "kernels/rope.h"
#include "model/recompute.h"
#include "model/registry.h"
#include "parallel/parameters.h"

namespace train_gpt {

/// The activations of a block; x is its input, the residual stream. All are [M, …] in the compute
/// dtype, except stats1, stats2 [M, 2] and lse [B, H, T], which are fp32. preact is up's output.
/// rotated [M, (H + H_kv)·D] holds q and k after a norm of heads, whose backward pass needs them as
/// they were; without one they are rotated in place.
struct BlockActivations {
    Tensor x, norm1, stats1, qkv, rotated, att, lse, x_mid, norm2, stats2, preact, hidden;
};

/// Gradients in the backward pass. dres is that of the residual stream; dy [M, C] and datt [M, H·D]
/// are temporary, as is dhidden [M, F] with SwiGLU; dup, which may be preact then, and dqkv are of the
/// outputs of `up` and `qkv`. They are shared by all blocks,
/// unless the two halves of the backward pass are called apart: then dup, dqkv and the copies of
/// dres at the block's output and middle, dout and dmid, keep their values from one half to the
/// other.
struct BlockGradients {
    Tensor dres, dy, datt, dhidden, dup, dqkv;
    Tensor dout = {}, dmid = {};
};

/// A block and the micro-batch, or the tokens, that it works on.
struct Block {
    const DecoderSpec& spec;
    const UnitLease& weights;
    const BlockParameters& parameters;
    const BlockActivations& activations;
    RopeShape rope = {};            // with rotary positions
    AttentionShape attention = {};  // of block_forward and block_backward
};

/// Which gradients a backward pass computes: those of inputs, those of weights, or both. A pass of
/// `inputs` and one of `weights` after it do the same as `both`. Gradients that norms sum up (their
/// own, and the bias of the projection before) come with the inputs.
enum class Backward { both, inputs, weights };

/// The RopeShape of B·T tokens of a decoder.
RopeShape rope_shape(const DecoderSpec& spec, DType dtype, int B, int T);

/// Heads first … of a packed tensor [B, T, heads, D].
HeadsView heads_view(Tensor packed, int first, int T, int D);

/// Computes norm1, stats1 and qkv, with q and k as attention takes them, from x.
void block_before_attention(Stream& stream, const Block& block);
/// Computes x_mid … hidden from att and x, and out [M, C], the next block's x. out is absent in
/// recomputation, which does not need it.
void block_after_attention(Stream& stream, const Block& block, Tensor out);
/// Both halves, with causal attention within the batch.
void block_forward(Stream& stream, const Block& block, Tensor out);

/// g.dres holds the gradient of the block's output and, unless only those of weights are computed,
/// receives the gradient of its input. Weight gradients go to the sinks of `store`.
void block_backward(Stream& stream, ParameterCollectives& store, const Block& block,
                    const BlockGradients& g, Recompute recompute, Backward part = Backward::both);

}  // namespace train_gpt
