// What a block computes in its forward pass and reads again in its backward pass, as data: the
// parts of a block list their activations, and Stage and Generator take memory for what the lists
// say.
#pragma once
#include <cstdint>
#include <vector>

#include "base/tensor.h"
#include "model/recompute.h"

namespace train_gpt {

/// The activations of a block of M tokens. All are [M, …] in the compute dtype, except stats1 and
/// stats2 [M, 2] and lse [B, H, T], which are fp32. x is the block's input, the residual stream;
/// preact is the output of `up`.
///
/// rotated [M, (H + H_kv)·D] holds q and k after a norm of heads, whose backward pass needs them as
/// they were. Without such a norm they are rotated in place, and rotated is absent.
///
/// Among tensor-parallel ranks, x, x_mid, stats1 and stats2 have this rank's rows [M / ranks, …],
/// and widths are this rank's part. norm1_rows and norm2_rows keep this rank's rows of norm1 and
/// norm2; they are absent where norm1 and norm2 keep all rows.
struct BlockActivations {
    Tensor x, norm1, stats1, qkv, rotated, att, lse, x_mid, norm2, stats2, preact, hidden;
    Tensor norm1_rows = {}, norm2_rows = {};
};

/// The last half of the backward pass that reads an activation.
enum class ReadBy : uint8_t { inputs, weights };

/// An entry of a part's list.
struct Activation {
    Tensor BlockActivations::*member;
    int64_t width = 0;          // columns
    DType dtype = DType::fp32;  // of its elements
    /// The first level of recomputation that computes it again; blocks then share its memory.
    Recompute dropped = Recompute::block;
    /// Where the halves of the backward pass are called apart, what the second half reads is kept.
    ReadBy read_by = ReadBy::inputs;
    bool in_training_only = false;
    bool of_ranks_rows = false;  // [M / ranks, width] among tensor-parallel ranks
    /// The member that keeps this rank's rows where tensor-parallel ranks gather all rows again in
    /// the backward pass.
    Tensor BlockActivations::*rows = nullptr;
};
using Activations = std::vector<Activation>;

/// Whether all blocks share the memory of an activation.
inline bool is_shared(const Activation& activation, Recompute level, bool halves_apart) {
    return level >= activation.dropped && !(halves_apart && activation.read_by == ReadBy::weights);
}

}  // namespace train_gpt
