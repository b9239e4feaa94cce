// Which tile of a grouped product a thread block computes: found from the experts' offsets, on the
// device.
#pragma once
#include <cstdint>

#include "kernels/cuda_block.cuh"
#include "kernels/experts/route.h"

namespace train_gpt::cuda::experts {

constexpr unsigned all_lanes = 0xffffffffu;

/// Sum over the lanes up to this one.
__device__ __forceinline__ int sum_up_to_lane(int value) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
#pragma unroll
    for (int distance = 1; distance < warp_size; distance *= 2) {
        const int before = __shfl_up_sync(all_lanes, value, distance);
        if (lane >= distance) value += before;
    }
    return value;
}

/// Rows of one expert.
struct RowTile {
    int expert, first_row, rows;  // rows: those that are left of the expert, from first_row on
    int group_rows;               // of the whole expert
    int64_t block;                // which of the blocks beside each other
};

/// Each expert's rows are cut into tiles of `tile` rows; the tiles of all experts are numbered one
/// after the other. E + 1 ints of shared memory.
class RowTiles {
  public:
    /// Called by all threads of a block.
    __device__ __forceinline__ RowTiles(int* first_tiles, const int32_t* offsets, int E, int tile)
        : first_(first_tiles), offsets_(offsets), E_(E), tile_(tile) {
        if (threadIdx.x < warp_size) {
            int before = 0;
            for (int e = 0; e < E; e += warp_size) {
                const int mine = e + static_cast<int>(threadIdx.x);
                const int tiles =
                    mine < E ? (offsets[mine + 1] - offsets[mine] + tile - 1) / tile : 0;
                const int up_to = sum_up_to_lane(tiles);
                if (mine < E) first_[mine] = before + up_to - tiles;
                before += __shfl_sync(all_lanes, up_to, warp_size - 1);
            }
            if (threadIdx.x == 0) first_[E] = before;
        }
        __syncthreads();
    }
    __device__ __forceinline__ int count() const { return first_[E_]; }

    /// Index of `blocks` blocks for each tile. Tiles go in bands of `band` tiles of an expert; in a
    /// band, all tiles have one block before any has the next, so that what runs at the same time
    /// shares both operands in the L2 cache.
    __device__ __forceinline__ RowTile find(int64_t index, int blocks, int band) const {
        int low = 0, high = E_;  // first_[low] * blocks <= index < first_[high] * blocks
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (int64_t{first_[middle]} * blocks <= index ? low : high) = middle;
        }
        const int first = offsets_[low], last = offsets_[low + 1],
                  tiles = first_[low + 1] - first_[low];
        const int64_t in_expert = index - int64_t{first_[low]} * blocks;
        const int band_first = static_cast<int>(in_expert / (int64_t{band} * blocks)) * band;
        const int64_t in_band = in_expert - int64_t{band_first} * blocks;
        const int width = min(band, tiles - band_first);
        const int row = first + (band_first + static_cast<int>(in_band % width)) * tile_;
        return {low, row, last - row, last - first, in_band / width};
    }

  private:
    int* first_;
    const int32_t* offsets_;
    int E_, tile_;
};

/// The experts in the order of how many rows they have, the most first, so that blocks finish
/// together. Called by all threads of a block. order and counts [E] are shared memory; counts are
/// free afterwards.
__device__ __forceinline__ void sort_experts(uint16_t* order, int* counts, const int32_t* offsets,
                                             int E) {
    const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    for (int e = first; e < E; e += step) counts[e] = offsets[e + 1] - offsets[e];
    __syncthreads();
    for (int e = first; e < E; e += step) {
        const int own = counts[e];
        int before = 0;
        for (int other = 0; other < E; ++other)
            before += counts[other] > own || (counts[other] == own && other < e);
        order[before] = static_cast<uint16_t>(e);
    }
    __syncthreads();
}

/// The number of tiles is known to the device alone; this is the most there can be.
inline int64_t most_row_tiles(int64_t rows, int64_t E, int64_t tile) { return rows / tile + E; }

}  // namespace train_gpt::cuda::experts
