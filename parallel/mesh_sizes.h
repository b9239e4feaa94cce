// The sizes of a mesh, and how many thread blocks its groups may have.
#pragma once

namespace train_gpt {

/// The sizes that a configuration gives. The size of `data` follows: the number of ranks divided by
/// the product of these sizes (without shard_ranks, which is a part of data).
struct MeshSizes {
    int pipeline = 1, context = 1, tensor = 1;
    int shard_ranks = 0;  // the size of the shard axis; 0: all data-parallel ranks
    bool allow_tensor_across_nodes = false;

    /// Whether a step has collectives of several groups at the same time. With the data axis alone,
    /// they come one after the other.
    bool has_several_groups() const { return pipeline > 1 || context > 1 || tensor > 1; }
};

/// The most thread blocks of a collective of each kind of group (group_ctas.h); 0: NCCL chooses.
struct GroupCtas {
    int everyone = 0, exchange = 0, messages = 0;

    bool operator==(const GroupCtas&) const = default;
};

}  // namespace train_gpt
