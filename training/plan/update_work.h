// What a rank's optimizer does in a step.
#pragma once
#include "parallel/state/parameter_buffers.h"
#include "training/config/layout.h"

namespace train_gpt {

/// Bytes of a rank's update.
struct UpdateBytes {
    double moved = 0;  // that its passes over memory read and write
    double state = 0;  // of masters and slots beside the weights, which offloading moves each way
};
/// The bytes of the pieces that the rank of these buffers updates. The buffers need no slots.
UpdateBytes update_bytes(const ParameterBuffers& buffers, const RunShape& shape);

/// The FLOPs of Muon's iterations on the rank that has the most of them in a step, of one pipeline
/// rank; 0 with another optimizer.
double muon_flops(const RunShape& shape, int rank);

}  // namespace train_gpt
