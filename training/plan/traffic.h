// What the ranks of a run send each other in a step: the sum of what each axis sends
// (parallel/axes/).
#pragma once
#include "parallel/mesh.h"
#include "training/config/layout.h"

namespace train_gpt {

/// What a rank with the most micro-batches sends in a step, by group of ranks.
/// config.batch.micro_batch must be given.
Traffic step_traffic(const RunShape& shape, int rank = 0);

/// The bytes of step_traffic() that are gradients, weights and sums.
int64_t state_bytes(const RunShape& shape, int rank = 0);

/// The most that a rank of any pipeline stage sends in a step, by group of ranks.
Traffic most_traffic(const RunShape& shape);

}  // namespace train_gpt
