// How many of a GPU's multiprocessors the collectives of each group of ranks may hold. NCCL calls
// their thread blocks CTAs (cooperative thread arrays): each holds a multiprocessor from the start
// of a collective to its end, also while it waits for other ranks.
#pragma once
#include <string>

#include "parallel/mesh_sizes.h"

namespace train_gpt {

/// A mesh with several axes has collectives of several groups that run at the same time. Suppose
/// that the collectives of one group hold all multiprocessors of a rank and wait for another rank,
/// where the collectives of another group hold all multiprocessors: then none ever ends. So the sum
/// stays below the number of multiprocessors, and some are left for kernels:
///
///   messages of the pipeline       4   they wait for most of the step, beside products
///   everyone                       2   kilobytes once a step, unless it is one of the others
///   data (and its parts, and ends) 24  one after the other, in one stream
///   tensor, context                24  one after the other, in one stream
///
/// 24 is what NCCL takes on a node of GPUs with NVLink. Where an eighth of the multiprocessors, and
/// at least one, would not be left, data, tensor and context get fewer. Where less than
/// 16 are left for collectives, the others get 1 each. wanted: parallel.nccl_max_ctas, for all.
GroupCtas group_ctas(int world, const MeshSizes& sizes, int multiprocessors, int wanted);

/// A line for `plan`; empty if NCCL chooses for all groups. For a GPU with so many multiprocessors.
std::string describe(const GroupCtas& ctas, int multiprocessors);

}  // namespace train_gpt
