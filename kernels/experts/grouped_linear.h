// Linear layers of experts: the products of linear.h for rows that are grouped by expert, each
// group with a weight of its own. The counts of rows are known to the device alone. Gale et al.
// (MegaBlocks), arXiv 2211.15841.
#pragma once
#include "base/tensor.h"
#include "device/stream.h"
#include "kernels/linear/linear.h"

namespace train_gpt {

/// Rows offsets[e] … offsets[e + 1] − 1 of R belong to expert e; an expert may have none. int32
/// [E + 1], offsets[0] = 0 and offsets[E] <= R; E <= most_experts, R <= 2²³ − 2¹⁶. Rows from
/// offsets[E] on are neither read nor written.
///
/// Where an operand x has a row_token, int32 [R], row r of the product reads x[row_token[r]], and x
/// is [tokens, K]. Floating dtypes are equal (fp32 or bf16), except that on the CPU out and dx may
/// be fp32 without a bias; products are summed in fp32. Where w has scales, the product is in fp8
/// (grouped_fp8.h).

/// out[r] = x[r]·w_eᵀ (+ bias_e). x [R, K], w [E, N, K], bias [E, N], out [R, N].
struct GroupedLinearForward {
    Tensor out, x;
    Operand w;
    Tensor offsets;
    Tensor row_token = {}, bias = {};
};
void grouped_linear_forward(Stream& stream, const GroupedLinearForward& args);

/// dx[r] = dy[r]·w_e. dy [R, N], w [E, N, K], dx [R, K].
struct GroupedLinearBackwardInput {
    Tensor dx, dy;
    Operand w;
    Tensor offsets;
};
void grouped_linear_backward_input(Stream& stream, const GroupedLinearBackwardInput& args);

/// dw_e (+)= dy_eᵀ·x_e and, if given, dbias_e (+)= column sums of dy_e, over the rows of each
/// expert in order. x [R, K], dy [R, N]; dw [E, N, K] and dbias [E, N] in fp32. The gradients of an
/// expert without rows become 0 where they are not accumulated.
struct GroupedLinearBackwardWeight {
    GradientSink dw;
    Tensor x, dy, offsets;
    Tensor row_token = {};
    GradientSink dbias = {};
};
void grouped_linear_backward_weight(Stream& stream, const GroupedLinearBackwardWeight& args);

/// What a layer's calls depend on besides its operands.
struct GroupedLinearShape {
    DType dtype = DType::fp32;
    int64_t E = 0, R = 0, N = 0, K = 0;
    /// In fp8: calls may come without w.rounded, and round the weights themselves.
    bool rounds_weights = true;
};
/// The scratch memory that the three calls need; in fp8, too, where KernelSettings::fp8 says that
/// there are such products.
size_t grouped_linear_scratch_bytes(const Stream& stream, const GroupedLinearShape& shape);

/// The minimum bytes and FLOPs of a call (device/profile.h), if every expert has rows.
Cost cost_of(const GroupedLinearForward& args);
Cost cost_of(const GroupedLinearBackwardInput& args);
Cost cost_of(const GroupedLinearBackwardWeight& args);

namespace cuda {  // grouped_linear.cu
void grouped_linear_forward(Stream& stream, const GroupedLinearForward& args);
void grouped_linear_backward_input(Stream& stream, const GroupedLinearBackwardInput& args);
void grouped_linear_backward_weight(Stream& stream, const GroupedLinearBackwardWeight& args);
size_t grouped_linear_scratch_bytes(const GroupedLinearShape& shape);
}  // namespace cuda

}  // namespace train_gpt
