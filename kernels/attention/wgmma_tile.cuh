// Shared by the attention kernels for sm_90a: tile sizes, and how a block divides its work.
//
// A block stays on its multiprocessor and processes tile after tile. Two warpgroups hold 64 rows
// each of a tile of 128 (queries, or keys in the pass for dk and dv) and multiply; one warp of a
// third has the copy engine load the held rows, a tile ahead, and stream the rows of the other
// operands, some stages ahead. Shah et al., arXiv 2407.08608.
#pragma once
#include <algorithm>
#include <optional>

#include "kernels/attention/tile.cuh"
#include "kernels/tensor_map.h"
#include "kernels/wgmma.cuh"

namespace train_gpt::cuda::tiles {

constexpr int block_rows = 128, consumers = 2, consumer_warps = consumers * warps,
              hopper_threads = (consumers + 1) * hopper::warpgroup_size;
static_assert(hopper::warpgroup_size == threads && block_rows == consumers * 64);

/// Registers per thread. A block of 384 threads begins with 168; the producer gives back 144 of
/// them, of which each consumer takes 72.
constexpr int producer_registers = 40, consumer_registers = 232;
static_assert(producer_registers + consumers * consumer_registers <= 3 * 168);

/// The tile sizes of a kernel for a head size, which is padded to 64, 96 or 128. Shared memory
/// holds a head of 96 as one of 128.
struct HopperTiling {
    int block_n;  // rows of a streamed tile
    int stages;   // streamed tiles in shared memory
    int held;     // held tiles in shared memory; 2: the next one is loaded while one is in use
};

/// Registers of a consumer thread for D = 128: out 64, scores 64, probabilities 32. A stage is a
/// tile of keys and one of values. A third stage would not fit for D = 128.
constexpr HopperTiling hopper_forward_tiling(int head) {
    return head <= 64 ? HopperTiling{128, 3, 2} : HopperTiling{128, 2, 2};
}
/// D = 64: dq 32, scores and their gradients 128, the latter in bf16 32. Tiles of 64 keys for a
/// larger D: dq 64, scores and gradients 64, in bf16 16. A stage is given back one tile late, since
/// its product for dq runs beside the next tile's scores; hence three.
constexpr HopperTiling hopper_queries_tiling(int head) {
    return head <= 64 ? HopperTiling{128, 3, 2} : HopperTiling{64, 3, 2};
}
/// D = 64: dk and dv 64, scores and their gradients 64, both in bf16 32; a stage is given back one
/// tile late. D = 128: dk and dv 128, so that no registers are left for products beside the next
/// tile's scores; two stages then do.
constexpr HopperTiling hopper_keys_tiling(int head) {
    return head <= 96 ? HopperTiling{64, 3, 2} : HopperTiling{64, 2, 2};
}

constexpr int hopper_shared_bytes_limit = 227 << 10;

/// Bytes of a tile of rows in shared memory.
template <int head>
constexpr int panels_bytes(int rows) {
    return hopper::panels(head) * hopper::panel_bytes(rows);
}

/// The barriers of a ring of tiles: `full` ends when the copies have arrived, `empty` when all
/// warps of the consumers have given a tile back.
template <int count>
struct TileBarriers {
    uint32_t first;

    static constexpr int bytes = 2 * count * 8;
    __device__ __forceinline__ uint32_t full(int i) const { return first + i * 8; }
    __device__ __forceinline__ uint32_t empty(int i) const { return first + (count + i) * 8; }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < count; ++i) {
            hopper::init_barrier(full(i), 1);
            hopper::init_barrier(empty(i), consumer_warps);
        }
    }
};

/// A warp gives a tile back: none of its lanes will read it.
__device__ __forceinline__ void give_back(uint32_t empty) {
    __syncwarp();
    if (lane_index() == 0) hopper::arrive(empty);
}

/// Rows [row, row + rows) of a head, to a tile of panels.
template <int head, int rows>
__device__ __forceinline__ void load_panels(uint32_t tile, const CUtensorMap& map, uint32_t barrier,
                                            int row, int h, int b) {
#pragma unroll
    for (int panel = 0; panel < hopper::panels(head); ++panel)
        hopper::load_box(tile + panel * hopper::panel_bytes(rows), map, barrier,
                         int4{panel * hopper::panel_columns, row, h, b});
}

/// The multiple of 1024 bytes at which the block's tiles begin.
__device__ __forceinline__ uint32_t tiles_begin(const void* memory) {
    return (shared_address(memory) + 1023u) & ~1023u;
}

/// scores += held · tileᵀ. `held`: the warpgroup's 64 rows of a tile of block_rows.
template <int head, int block_n>
__device__ __forceinline__ void add_scores(float (&scores)[block_n / 8][4], uint32_t held,
                                           int first_row, uint32_t tile) {
#pragma unroll
    for (int k = 0; k < head / 16; ++k)
        hopper::multiply<false, false>(scores, hopper::along_rows<block_rows>(held, k, first_row),
                                       hopper::along_rows<block_n>(tile, k), k > 0);
}
/// sums += weights · tile
template <int head, int block_n>
__device__ __forceinline__ void add_weighted(float (&sums)[head / 8][4],
                                             const uint32_t (&weights)[block_n / 16][4],
                                             uint32_t tile) {
#pragma unroll
    for (int k = 0; k < block_n / 16; ++k)
        hopper::multiply<true>(sums, weights[k], hopper::across_rows<block_n>(tile, k));
}
template <int columns>
__device__ __forceinline__ void to_weights(uint32_t (&weights)[columns / 2][4],
                                           const float (&scores)[columns][4]) {
#pragma unroll
    for (int k = 0; k < columns / 2; ++k) to_weights(weights[k], scores[2 * k], scores[2 * k + 1]);
}

/// Blocks take the scheduler's assignments in turn; each has a multiprocessor to itself.
template <class Kernel, class Maps, class... Arguments>
void launch_hopper(const Stream& stream, Kernel* kernel, const TileScheduler& scheduler,
                   int shared_bytes, const Maps& maps, const Arguments&... arguments) {
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    const int blocks = std::clamp(limits_of(stream).multiprocessors - stream.settings.reserved_sms,
                                  1, std::max(1, scheduler.heads * scheduler.tiles));
    kernel<<<static_cast<unsigned>(blocks), hopper_threads, static_cast<size_t>(shared_bytes),
             stream_of(stream)>>>(maps, arguments..., scheduler);
    CUDA_CHECK_LAUNCH();
}

/// with_variant() for the head sizes of these kernels.
template <class F>
void with_hopper_variant(const AttentionShape& shape, F&& f) {
    const auto with_head = [&](auto head) {
        if (shape.softcap == 0)
            f(head, std::false_type{});
        else
            f(head, std::true_type{});
    };
    if (shape.D <= 64) return with_head(std::integral_constant<int, 64>{});
    if (shape.D <= 96) return with_head(std::integral_constant<int, 96>{});
    return with_head(std::integral_constant<int, 128>{});
}

}  // namespace train_gpt::cuda::tiles
