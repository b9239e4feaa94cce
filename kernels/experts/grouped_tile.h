// Grouped products on tensor cores: bf16, N and K multiples of 8, and tensors at multiples of 16
// bytes.
#pragma once
#include "kernels/experts/grouped_linear.h"

namespace train_gpt::cuda {

/// dx as the out of a forward product of dy with the transposed weights.
inline GroupedLinearForward as_forward(const GroupedLinearBackwardInput& args) {
    return {.out = args.dx, .x = args.dy, .w = args.w, .offsets = args.offsets};
}

bool tile_supports(const GroupedLinearForward& args);
bool tile_supports(const GroupedLinearBackwardInput& args);
bool tile_supports(const GroupedLinearBackwardWeight& args);

void tile_forward(Stream& stream, const GroupedLinearForward& args);
void tile_backward_input(Stream& stream, const GroupedLinearBackwardInput& args);
void tile_backward_weight(Stream& stream, const GroupedLinearBackwardWeight& args);

/// The same with wgmma and the tensor copy engine (grouped_wgmma.cu), on GPUs of sm_90, in tiles of
/// 128 × block_n, 128 or 256. For what tile_supports(). False, with nothing submitted, where a
/// tensor map cannot be made or the build has no code for sm_90a.
bool wgmma_forward(Stream& stream, const GroupedLinearForward& args, int block_n);
bool wgmma_backward_input(Stream& stream, const GroupedLinearBackwardInput& args, int block_n);
bool wgmma_backward_weight(Stream& stream, const GroupedLinearBackwardWeight& args, int block_n);
/// Whether the build has code for sm_90a.
bool wgmma_is_built();

}  // namespace train_gpt::cuda
