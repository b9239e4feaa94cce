// What the ranks of a run send each other in a step: the sum of what each axis sends
// (parallel/axes/).
#pragma once
#include "parallel/axes/tensor.h"
#include "parallel/mesh.h"
#include "parallel/pipeline/pipeline_schedule.h"
#include "training/config/layout.h"

namespace train_gpt {

/// A micro-batch along the tensor axis, of a rank's `tokens`, as yet without layers, embedding and
/// head. halves_apart: backward passes come in two halves.
TensorTraffic tensor_traffic(const RunShape& shape, int64_t tokens, bool halves_apart);

/// What a rank with the most micro-batches sends in a step, by group of ranks. `schedule`: the
/// run's. of_any_rank: the most that a rank of this rank's stage sends. config.batch.micro_batch
/// must be given.
Traffic step_traffic(const RunShape& shape, const PipelineSchedule& schedule, int rank,
                     bool of_any_rank = false);

/// The bytes of step_traffic() that are gradients, weights and sums.
int64_t state_bytes(const RunShape& shape, int rank = 0);

/// The most that a rank of any pipeline stage sends in a step, by group of ranks.
Traffic most_traffic(const RunShape& shape);

}  // namespace train_gpt
