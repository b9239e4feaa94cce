// How the state of a training run is split over ranks, and which rank this is (ZeRO: Rajbhandari et
// al., arXiv 1910.02054).
#pragma once
#include <cstdint>
#include <optional>

#include "base/dtype.h"

namespace train_gpt {

/// How gradients are added over micro-batches and ranks.
enum class GradientSums : uint8_t {
    fp32,   // in fp32
    bf16,   // sums in memory in fp32, and rounded to bf16 on their way between ranks
    exact,  // each micro-batch's gradients are rounded to grids and added as integers (grids.h)
};

/// How an optimizer gets whole matrices to update (matrices.h).
struct MatrixUpdates {
    DType dtype = DType::bf16;  // of a matrix's momentum, and of its update
    bool heads = false;         // each head of q, k and v is a matrix of its own
};

struct Sharding {
    /// This rank's number among the `size` ranks that the state is split over (shard × context).
    /// ZeRO-0 splits nothing: then among the ranks whose gradients are added up.
    int rank = 0, size = 1;
    /// Each replica, a group of such ranks, holds the same state. The gradients of all replicas are
    /// added up.
    int replica = 0, replicas = 1;
    int tensor = 0, tensors = 1;  // tensor-parallel rank
    /// The pipeline rank, and whether the first and the last one hold the same embedding.
    int pipeline = 0, pipelines = 1;
    bool tied_ends = false;
    int world = 1;  // all ranks of the run, which add up the norm
    /// ZeRO's stage. 0: every rank updates everything. 1: masters and the optimizer's slots are
    /// split. 2: gradient sums as well. 3: weights as well; they are gathered bucket by bucket
    /// while a pass uses them.
    int zero = 1;
    int64_t bucket_elements = (int64_t{64} << 20) / 4;
    GradientSums sums = GradientSums::fp32;
    std::optional<MatrixUpdates> matrices = {};  // nothing: each element is updated for itself
    /// Masters and the optimizer's slots are in host memory, and come to the GPU bucket by bucket
    /// to be updated (state_leases.h).
    bool state_on_host = false;

    bool is_exact() const { return sums == GradientSums::exact; }
    /// A micro-batch's gradients stand alone: kernels write them to memory of their own, from which
    /// they are added to the sums of the step. Otherwise kernels add them to the sums.
    bool gradients_stand_alone() const { return is_exact() || reduces_each(); }
    /// The ranks reduce gradients in every micro-batch, not once in a step.
    bool reduces_each() const { return zero >= 2; }
    /// Each pass through the model gathers the weights, which this rank does not hold whole.
    bool gathers_each() const { return zero >= 3; }
    /// The dtype of gradients between ranks.
    DType dtype_between_ranks() const {
        return is_exact() ? DType::int32 : sums == GradientSums::bf16 ? DType::bf16 : DType::fp32;
    }
    /// The state is split over the ranks of the group, not only held by each of them.
    bool is_split() const { return zero > 0; }
    /// The state that this rank updates is also updated by an earlier rank of its data-parallel
    /// group.
    bool is_copy() const { return (!is_split() && rank > 0) || replica > 0; }
};

}  // namespace train_gpt
