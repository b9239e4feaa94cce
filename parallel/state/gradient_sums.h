// Which ranks add up which gradients. The traffic, the first collectives and the simulation of a
// step ask this list, and Gradients goes through it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "parallel/mesh.h"
#include "parallel/range.h"
#include "parallel/state/bucket_layout.h"
#include "parallel/state/sharding.h"

namespace train_gpt {

/// The ranks of a sum. A bucket goes through its sums in this order.
enum class SumOver : uint8_t {
    tensor,    // tensor-parallel ranks, for tensors of which each rank has the whole
    shards,    // the ranks that the state is split over; with ZeRO-0 all of data × context
    replicas,  // ranks in different replicas that hold the same shard
    ends,      // the first and the last pipeline rank, for a tied embedding that both hold
};

/// A sum over one group of ranks.
struct GradientSum {
    SumOver over = SumOver::shards;
    int64_t ranks = 1;                         // of the group
    size_t first_bucket = 0, last_bucket = 0;  // where the elements lie
    Range elements;                            // in the flat buffers
    int parameter = -1;                        // a tied embedding; −1: a range of a bucket
    DType dtype = DType::fp32;                 // on the way
    bool scattered = false;                    // each rank receives the sums of its shard alone
    bool every_micro_batch = false;            // or once in a step, after the last one

    /// A rank sends bytes_moved()·(ranks − 1)/ranks: an all-reduce moves each element twice, a
    /// reduce-scatter once.
    int64_t bytes_moved() const {
        return (scattered ? 1 : 2) * elements.n * static_cast<int64_t>(size_of(dtype));
    }
    bool has(size_t bucket) const { return first_bucket <= bucket && bucket <= last_bucket; }
};

/// All sums of a step over more than one rank, by bucket. Sums over the pipeline's ends come last.
std::vector<GradientSum> gradient_sums(const BucketLayout& layout,
                                       const std::vector<Parameter>& parameters,
                                       const Sharding& sharding);

/// The axes that the ranks of a sum differ on. For a sum over the pipeline's ends: the axes besides
/// the pipeline.
Axes axes_of(SumOver over, const Sharding& sharding);
/// The axis whose exchanges include the sum: tensor, data or pipeline.
Axis axis_of_exchange(SumOver over);
/// The group of a sum, and its name (MeshLayout::group_name).
Communicator& group_of(SumOver over, const Mesh& mesh, const Sharding& sharding);
std::string name_of(SumOver over, const MeshLayout& mesh, const Sharding& sharding);

}  // namespace train_gpt
