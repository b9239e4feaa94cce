// What a training step moves between ranks.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "parallel/mesh.h"
#include "parallel/state/bucket_layout.h"
#include "parallel/state/parameter_buffers.h"

namespace train_gpt {

/// Bytes by group of ranks (MeshLayout::group_name).
using Traffic = std::map<std::string, int64_t>;

/// A pass acquires the weights of the units `first` to `last`, which is the lower number in a backward
/// pass.
struct UnitPass {
    int first = 0, last = 0;
};

/// The bytes that each rank sends for gradients, weights and sums in a step between two others, as
/// Communicator counts them. With d ranks that split the state and buckets of n elements together:
/// reducing gradients in a dtype of r bytes takes r·n·(d−1)/d, twice that with ZeRO-0, and from ZeRO-2
/// on that much in each of `micro_batches`, the most that a rank has; adding up the shards of k replicas
/// 2·r·(n/d)·(k−1)/k. Gathering weights of w bytes takes w·n·(d−1)/d, except with ZeRO-0; with ZeRO-3
/// also again, in every one of `passes`, the step's in order, those of its buckets that take turns, but
/// for those that are still there of the passes before, two at most. Last, `sums` fp64 numbers of every
/// rank, and between t tensor-parallel ranks 8·a·(t−1)/t for the gradients of a elements that they add
/// up, as often as gradients are reduced. A tied embedding of n elements that two pipeline ranks hold
/// takes 8·n·(2·d−1)/(2·d), or 4·n with ZeRO-0.
Traffic state_traffic(const MeshLayout& mesh, const ParameterBuffers& buffers,
                      const std::vector<UnitPass>& passes, int64_t micro_batches, int64_t sums);

}  // namespace train_gpt
