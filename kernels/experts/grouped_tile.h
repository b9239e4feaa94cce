// Grouped products on tensor cores: bf16, N and K multiples of 8, and tensors at multiples of 16
// bytes.
#pragma once
#include "kernels/experts/grouped_linear.h"

namespace train_gpt::cuda {

bool tile_supports(const GroupedLinearForward& args);
bool tile_supports(const GroupedLinearBackwardInput& args);
bool tile_supports(const GroupedLinearBackwardWeight& args);

void tile_forward(Stream& stream, const GroupedLinearForward& args);
void tile_backward_input(Stream& stream, const GroupedLinearBackwardInput& args);
void tile_backward_weight(Stream& stream, const GroupedLinearBackwardWeight& args);

}  // namespace train_gpt::cuda
