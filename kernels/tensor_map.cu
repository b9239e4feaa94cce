#include <algorithm>
#include <array>
#include <limits>

#include <cuda_runtime.h>

#include "kernels/tensor_map.h"

namespace train_gpt::cuda {

namespace {

constexpr size_t most_dimensions = 5;
constexpr int64_t stride_limit = int64_t{1} << 40;
constexpr int64_t largest_extent = std::numeric_limits<int32_t>::max();  // of a box's coordinates
constexpr int box_row_bytes = 128;

using Encode = decltype(&cuTensorMapEncodeTiled);

/// The driver's function; null if the driver has none. The program is not linked with the driver.
Encode encoder() {
    static const Encode function = []() -> Encode {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
        const cudaError_t status = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
        const cudaError_t status =
            cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
        if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
        return reinterpret_cast<Encode>(found);
    }();
    return function;
}

}  // namespace

std::optional<CUtensorMap> tensor_map(const TensorMapArgs& args) {
    const size_t rank = args.extents.size();
    std::array<cuuint64_t, most_dimensions> extents{}, strides{};
    std::array<cuuint32_t, most_dimensions> box{}, steps{};
    if (reinterpret_cast<uintptr_t>(args.data) % 16 != 0 || !encoder()) return std::nullopt;
    for (size_t i = 0; i < rank; ++i) {
        if (args.extents[i] < 1 || args.extents[i] > largest_extent) return std::nullopt;
        extents[i] = static_cast<cuuint64_t>(args.extents[i]);
        box[i] = static_cast<cuuint32_t>(i == 0   ? box_row_bytes / args.element_bytes
                                         : i == 1 ? args.box_rows
                                                  : 1);
        steps[i] = 1;
        if (i + 1 == rank) continue;
        // A stride of a dimension of one element is never used.
        const int64_t bytes = args.extents[i + 1] == 1 ? 16 : args.strides[i] * args.element_bytes;
        if (bytes <= 0 || bytes % 16 != 0 || bytes >= stride_limit) return std::nullopt;
        strides[i] = static_cast<cuuint64_t>(bytes);
    }
    CUtensorMap map;
    const CUresult status = encoder()(
        &map,
        args.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8,
        static_cast<cuuint32_t>(rank), const_cast<void*>(args.data), extents.data(), strides.data(),
        box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) return std::nullopt;
    return map;
}

std::optional<CUtensorMap> tensor_map(const HeadsView& view, int B, int rows, int heads, int D,
                                      int box_rows) {
    return tensor_map({.data = view.data,
                       .extents = {D, rows, heads, B},
                       .strides = {view.token, view.head, view.batch},
                       .box_rows = box_rows});
}

}  // namespace train_gpt::cuda
