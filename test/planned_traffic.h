// What the plan says that a rank of a run sends in a step.
#pragma once
#include "training/plan/traffic.h"

namespace train_gpt {

inline Traffic planned_traffic(const RunShape& shape, int rank = 0) {
    return step_traffic(shape, pipeline_schedule(pipeline_shape(shape)), rank);
}

}  // namespace train_gpt
