// Tensor maps: how the copy engine of sm_90 finds the boxes of a tensor of bf16 or of codes of fp8.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include <cuda.h>

#include "kernels/heads_view.h"

namespace train_gpt::cuda {

/// Dimension 0 has adjacent elements; dimension i + 1 of the tensor has a stride of strides[i]
/// elements. A box has 128 bytes of dimension 0, `box_rows` elements of dimension 1 and one of the
/// others; it arrives in shared memory as rows of 128 bytes, swizzled (wgmma.cuh). Elements outside
/// the tensor arrive as zeros.
struct TensorMapArgs {
    const void* data = nullptr;
    std::vector<int64_t> extents = {}, strides = {};  // one stride less than extents
    int box_rows = 0;
    int element_bytes = 2;  // 2: bf16; 1: codes
};

/// Nothing where a map cannot be made: the driver has no tensor maps, the address or a stride is no
/// multiple of 16 bytes, a stride is 2⁴⁰ bytes or more or negative, or an extent is 0 or more than
/// a coordinate of 32 bits can be.
std::optional<CUtensorMap> tensor_map(const TensorMapArgs& args);

/// The map of a view's heads: dimensions d, t, h, b.
std::optional<CUtensorMap> tensor_map(const HeadsView& view, int B, int rows, int heads, int D,
                                      int box_rows);

}  // namespace train_gpt::cuda
