// What a block computes in its forward pass and reads again in its backward pass, as data: the
// parts of a block list their activations, and Stage and Generator take memory for what the lists
// say.
#pragma once
#include <cstdint>
#include <vector>

#include "base/tensor.h"
#include "model/recompute.h"

namespace train_gpt {

/// The activations of a block of M tokens. All are [M, …] in the compute dtype, except stats1,
/// stats2 and qk_sums [M, 2] and lse [B, H, T], which are fp32. x is the block's input, the
/// residual stream; preact is the output of `up`.
///
/// rotated [M, (H + H_kv)·D] holds q and k after a norm of q and k, whose backward pass needs them
/// as they were. Without such a norm they are rotated in place, and rotated is absent.
///
/// With a norm over the whole width of q and k, qk_sums [M, 2] holds its sums (kernels/rope.h), of
/// all tensor-parallel ranks.
///
/// In a mixture of experts, R = M·k rows lie one expert after the other (kernels/experts/):
///
///   preact [R, 2F], hidden [R, F]     values inside the experts
///   expert_out [R, C]                 the experts' output; in the backward pass, its gradient
///   logits [M, E]                     the router's logits, fp32
///   experts, expert_weights [M, k]    a token's experts, int32, and their weights, fp32
///   row_of [M, k], row_token [R, 1]   the rows of a token, and the token of a row; int32
///   offsets [1, E + 1]                where each expert's rows begin, int32
///   counts, probabilities [B, E]      the router's sums over each sequence; int32 and fp32
///   load [B, E]                       each expert's share, fp32, for a balance loss over sequences
///                                     or micro-batches
///   selection_bias [1, E]             the router's selection bias, fp32
///
/// The shared expert has activations of its own. Its gate is a router of one expert: shared_logit,
/// shared_choice, shared_weight [M, 1].
///
/// Among tensor-parallel ranks, x, x_mid, stats1 and stats2 have this rank's rows [M / ranks, …],
/// and widths are this rank's part. norm1_rows and norm2_rows keep this rank's rows of norm1 and
/// norm2; they are absent where norm1 and norm2 keep all rows.
struct BlockActivations {
    Tensor x, norm1, stats1, qkv, rotated, att, lse, x_mid, norm2, stats2, preact, hidden;
    Tensor norm1_rows = {}, norm2_rows = {};
    Tensor qk_sums = {};
    Tensor logits = {}, experts = {}, expert_weights = {}, counts = {}, probabilities = {},
           load = {}, selection_bias = {}, offsets = {}, row_token = {}, row_of = {},
           expert_out = {};
    Tensor shared_logit = {}, shared_choice = {}, shared_weight = {}, shared_preact = {},
           shared_hidden = {}, shared_out = {};
};

/// The last half of the backward pass that reads an activation.
enum class ReadBy : uint8_t { inputs, weights };

/// How many rows an activation has, divided by Activation::each.
enum class RowsOf : uint8_t {
    tokens,        // M
    ranks_tokens,  // M / tensor-parallel ranks
    sequences,     // B
    one,
};

/// An entry of a part's list.
struct Activation {
    Tensor BlockActivations::*member;
    int64_t width = 0;          // columns
    DType dtype = DType::fp32;  // of its elements
    RowsOf rows_of = RowsOf::tokens;
    int64_t each = 1;  // rows for each token or sequence
    /// The activation is kept at every level of recomputation, so that nothing is routed twice.
    bool is_route = false;
    /// The first level of recomputation that computes the activation again. Blocks then share its
    /// memory.
    Recompute dropped = Recompute::block;
    /// Where the halves of the backward pass are called apart, activations that the second half
    /// reads are kept.
    ReadBy read_by = ReadBy::inputs;
    bool in_training_only = false;
    /// The member that keeps this rank's rows where tensor-parallel ranks gather all rows again in
    /// the backward pass.
    Tensor BlockActivations::*rows = nullptr;

    int64_t rows_with(int64_t tokens, int64_t ranks_tokens, int64_t sequences) const {
        return each * (rows_of == RowsOf::tokens         ? tokens
                       : rows_of == RowsOf::ranks_tokens ? ranks_tokens
                       : rows_of == RowsOf::sequences    ? sequences
                                                         : 1);
    }
};
using Activations = std::vector<Activation>;

/// Whether all blocks share the memory of an activation.
inline bool is_shared(const Activation& activation, Recompute level, bool halves_apart) {
    return level >= activation.dropped && !activation.is_route &&
           !(halves_apart && activation.read_by == ReadBy::weights);
}

}  // namespace train_gpt
