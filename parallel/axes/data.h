// The data axis, replica × shard: each of its places computes micro-batches of its own. Its ranks
// add up gradients, and ZeRO splits the state over the ranks of shard × context.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "base/dtype.h"
#include "parallel/mesh.h"
#include "parallel/state/parameter_buffers.h"
#include "parallel/state/sharding.h"
#include "parallel/step_collectives.h"

namespace train_gpt {

struct DataOptions {
    int zero = 1;                 // ZeRO's stage
    bool tied_head = false;       // the output head is the embedding
    int64_t bucket_elements = 0;  // of the flat buffers
    GradientSums sums = GradientSums::fp32;
    std::optional<MatrixUpdates> matrices = {};
    bool state_on_host = false;
};

/// How ZeRO splits the state, for a rank of the mesh. A group of one rank splits nothing.
Sharding sharding_of(const MeshLayout& mesh, int rank, const DataOptions& options);

/// Makes the groups that exchange buckets. Returns the sums of gradients over any of the mesh's
/// axes (gradient_sums.h), and the gathers of weights as `sharding` says.
std::vector<StepCollective> collectives_of_data(const Mesh& mesh,
                                                const std::vector<Parameter>& parameters,
                                                const Sharding& sharding, const StepSizes& sizes);

/// A pass acquires the weights of the units `first` to `last`, which is the lower number in a
/// backward pass.
struct UnitPass {
    int first = 0, last = 0;
};

/// The bytes that each rank sends for gradients, weights and numbers in a step that is neither the
/// first nor the last one of a run, as Communicator counts them:
///
///   all-reduce       2·r·n·(k−1)/k   gradients of tensor-parallel copies, of replicas, of a tied
///                                    embedding, and with ZeRO-0
///   reduce-scatter     r·n·(k−1)/k   gradients with ZeRO-1, 2 and 3
///   gather             w·n·(d−1)/d   weights, except with ZeRO-0
///   numbers                          sums.fp64 go to every other rank; the others are all-reduced
///   matrices                         elements go to the owner and back, at most once each
///                                    (matrices.h)
///
///   n      elements
///   r, w   bytes of an element of gradients on their way, and of a weight
///   k      ranks of a sum (GradientSum)
///   d      ranks that the state is split over
///
/// A sum is sent once in a step. With ZeRO-2 and 3 it is sent in each of `micro_batches`, the most
/// that a rank has, except sums over replicas and over the pipeline's ends. Weights are gathered
/// once in a step. With ZeRO-3, the buckets that take turns are gathered in each of `passes`, the
/// step's in order, except the at most two that are still there. Ranks send different numbers of
/// bytes of matrices; of_any_rank: the most that a rank of the stage sends.
Traffic state_traffic(const MeshLayout& mesh, const ParameterBuffers& buffers,
                      const std::vector<UnitPass>& passes, int64_t micro_batches,
                      const StepNumbers& sums, bool of_any_rank = false);

}  // namespace train_gpt
