// One pre-norm transformer block over M = B·T tokens:
//   x_mid = x + out(attention(qkv(norm1(x))))        q and k rotated, where positions are rotary
//   x_out = x_mid + down(hidden(up(norm2(x_mid))))   hidden: gelu, or silu(gate) ⊙ up of both halves
// The forward pass is split into the halves before and after attention, because training attends
// within a batch and sampling attends to a cache. A block knows nothing of those before and after it.
//
// Tensor-parallel ranks (parallel/axes/tensor_group.h) share the products: a rank has its part of the
// columns of qkv and up, of the rows of out and down. The residual stream and the norms are of the
// rank's rows. The norms' outputs are gathered before the products that read them, and the products
// into the residual stream are sums of all ranks' parts, to which the norm after it adds residual
// and bias.
#pragma once
#include <cstdint>
#include <vector>

#include "device/device.h"
#include "device/memory.h"
#include "kernels/attention/attention.h"
#include "kernels/rope.h"
#include "model/context_attention.h"
#include "model/recompute.h"
#include "model/registry.h"
#include "parallel/axes/tensor_group.h"
#include "parallel/state/parameters.h"

namespace train_gpt {

/// The activations of a block; x is its input, the residual stream. All are [M, …] in the compute
/// dtype, except stats1, stats2 [M, 2] and lse [B, H, T], which are fp32. preact is up's output.
/// rotated [M, (H + H_kv)·D] holds q and k after a norm of heads, whose backward pass needs them as
/// they were; without one they are rotated in place.
///
/// Of tensor-parallel ranks, x, x_mid and stats have the rank's rows [M / ranks, …], and widths are
/// those of its part. norm1_rows and norm2_rows keep its rows of norm1 and norm2, unless these keep
/// all. products [M, C] is for parts of sums, added_up [M / ranks, C] for the rank's rows of them.
struct BlockActivations {
    Tensor x, norm1, stats1, qkv, rotated, att, lse, x_mid, norm2, stats2, preact, hidden;
    Tensor norm1_rows = {}, norm2_rows = {}, products = {}, added_up = {};
};

/// What a block's input is the sum of, among tensor-parallel ranks; the input itself otherwise.
struct Addends {
    Tensor sum = {}, residual = {}, bias = {};
};

/// Gradients in the backward pass. dres is that of the residual stream; dy [M, C] and datt [M, H·D]
/// are temporary (of tensor-parallel ranks, dres, dy, dout and dmid have the rank's rows), as is dhidden [M, F] with SwiGLU; dup, which may be preact then, and dqkv are of the
/// outputs of `up` and `qkv`. They are shared by all blocks,
/// unless the two halves of the backward pass are called apart: then dup, dqkv and the copies of
/// dres at the block's output and middle, dout and dmid, keep their values from one half to the
/// other. early, fp32, does so too for the gradients of weights that come with those of inputs
/// (early_gradients()); if it is absent, they go to their sinks at once.
struct BlockGradients {
    Tensor dres, dy, datt, dhidden, dup, dqkv;
    Tensor dout = {}, dmid = {}, early = {};
};

/// A block and the micro-batch, or the tokens, that it works on.
struct Block {
    const DecoderSpec& spec;  // of the rank's part
    TensorGroup& tensor;
    const UnitLease& weights;
    const BlockParameters& parameters;
    const BlockActivations& activations;
    RopeShape rope = {};                  // with rotary positions
    AttentionShape attention = {};        // of block_forward and block_backward
    Addends input = {};                   // where the block computes its x
    ContextAttention* context = nullptr;  // of context-parallel ranks
};

/// Which gradients a backward pass computes: those of inputs, those of weights, or both. A pass of
/// `inputs` and one of `weights` after it do the same as `both`. Gradients that norms sum up (their
/// own, and the bias of the projection before) come with the inputs.
enum class Backward { both, inputs, weights };

/// A parameter whose gradient comes with those of inputs, and its place in BlockGradients::early.
struct EarlyGradient {
    int parameter = -1;
    int64_t offset = 0, numel = 0;

    int64_t end() const { return offset + numel; }
};

/// Those of a block.
std::vector<EarlyGradient> early_gradients(const DecoderSpec& spec,
                                           const BlockParameters& parameters);

/// The RopeShape of B·T tokens of a decoder.
RopeShape rope_shape(const DecoderSpec& spec, DType dtype, int B, int T);

/// Heads first … of a packed tensor [B, T, heads, D].
HeadsView heads_view(Tensor packed, int first, int T, int D);

/// Computes norm1, stats1 and qkv, with q and k as attention takes them, from x.
void block_before_attention(Stream& stream, const Block& block);
/// Computes x_mid … hidden from att and x, and out [M, C], the next block's x; among tensor-parallel
/// ranks, the rank's rows of what it is the sum of, besides x_mid and down's bias. out is absent in
/// recomputation, which does not need it.
void block_after_attention(Stream& stream, const Block& block, Tensor out);
/// Both halves, with causal attention within the batch.
void block_forward(Stream& stream, const Block& block, Tensor out);

/// g.dres holds the gradient of the block's output and, unless only those of weights are computed,
/// receives the gradient of its input. Weight gradients go to the sinks of `gradients`.
void block_backward(Stream& stream, Gradients& gradients, const Block& block,
                    const BlockGradients& g, Recompute recompute, Backward part = Backward::both);

}  // namespace train_gpt
