// Products of experts in fp8 (kernels/fp8.h): both matrices are rounded, x and w to e4m3 and dy to
// e5m2, and products of codes are summed in fp32. All experts of a layer have one scale for their
// weights, and one for their rows. Gradients of weights stay in the dtype of x and dy: tensor cores
// read fp8 along the rows over which these sum, 16 at a time, and an expert's rows may begin
// anywhere.
#pragma once
#include "kernels/experts/grouped_linear.h"

namespace train_gpt {

/// What the calls of grouped_linear.h do where they have scales. N and K are multiples of
/// fp8_multiple.
void grouped_linear_forward_fp8(Stream& stream, const GroupedLinearForward& args);
void grouped_linear_backward_input_fp8(Stream& stream, const GroupedLinearBackwardInput& args);

size_t grouped_fp8_scratch_bytes(const Stream& stream, const GroupedLinearShape& shape);

namespace cuda {  // grouped_fp8.cu
void grouped_linear_forward_fp8(Stream& stream, const GroupedLinearForward& args);
void grouped_linear_backward_input_fp8(Stream& stream, const GroupedLinearBackwardInput& args);
size_t grouped_fp8_scratch_bytes(const GroupedLinearShape& shape);
}  // namespace cuda

}  // namespace train_gpt
