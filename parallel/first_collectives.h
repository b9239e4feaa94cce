// The collectives of a training step, done once before memory is planned.
#pragma once
#include <cstdint>
#include <vector>

#include "device/device.h"
#include "parallel/mesh.h"
#include "parallel/state/parameter.h"
#include "parallel/state/sharding.h"
#include "parallel/step_collectives.h"

namespace train_gpt {

/// Makes NCCL take now what it would take of the GPU's memory in the first step: hundreds of MiB
/// for connections and kernels. It connects ranks when it first uses an algorithm, which it chooses
/// by operation and size. So each collective of a step is done once with each of its sizes: the
/// sizes of buckets, and the sizes that follow from a micro-batch. Collectives of more than
/// largest_first_bytes are cut. The memory that is exchanged here is free again afterwards. On any
/// device, the call makes the mesh's groups that a step uses. All ranks call it, each with the
/// parameters that it holds. Throws Error if the memory is not there.
void do_first_collectives(const Mesh& mesh, const Device& device,
                          const std::vector<Parameter>& parameters, const Sharding& sharding,
                          const StepSizes& sizes);

/// For larger buffers NCCL is expected to choose the same algorithm.
constexpr int64_t largest_first_bytes = int64_t{256} << 20;

}  // namespace train_gpt
