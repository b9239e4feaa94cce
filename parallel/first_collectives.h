// The collectives of a training step, done once before memory is planned.
#pragma once
#include <cstdint>

#include "device/device.h"
#include "parallel/mesh.h"
#include "parallel/state/bucket_layout.h"
#include "parallel/state/sharding.h"

namespace train_gpt {

/// Makes NCCL take now what it would take of the GPU's memory in the first step: hundreds of MiB
/// for connections and kernels. It connects ranks when it first uses an algorithm, which it chooses
/// by operation and size, so each axis (first_use.h) does every operation of a step once for each
/// size of bucket, with weights of dtype `weights`. Then all ranks gather one and `sums` fp64
/// numbers of each rank. Buckets of more than largest_first_bytes are cut. The memory that is
/// exchanged here is free again afterwards. On any device it makes the mesh's groups that a step
/// uses. All ranks call it. Throws Error if that memory is not there.
void do_first_collectives(const Mesh& mesh, const Device& device, const BucketLayout& layout,
                          const Sharding& sharding, DType weights, int64_t sums);

/// For larger buffers NCCL is expected to choose the same algorithm.
constexpr int64_t largest_first_bytes = int64_t{256} << 20;

}  // namespace train_gpt
