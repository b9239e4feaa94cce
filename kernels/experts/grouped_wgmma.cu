// Grouped products with Hopper's own instructions. Blocks stay on the GPU and take tiles of 128×128
// or 128×256 in turn, dealt over the experts from their offsets. Slices of both operands, 64
// elements deep, pass through a ring of stages in shared memory: a warpgroup fills them, two others
// multiply 64 rows of the tile each. Stages are filled for the next tile while a tile is written.
#include <algorithm>
#include <cstdint>
#include <optional>

#include "kernels/experts/grouped_tile.h"
#include "kernels/experts/wgmma_stages.cuh"
#include "kernels/tensor_map.h"

namespace train_gpt::cuda {

#ifdef TRAIN_GPT_SM90A

namespace {

using namespace wgmma_stages;
using tiles::Element;

constexpr int depth = stage_row_bytes / int{sizeof(Element)};

/// Multiplies the slices of a tile; a stage is given back one slice late, since its products run
/// beside the next slice's.
template <int block_n, bool left_across, bool right_across>
__device__ __forceinline__ void multiply_slices(float (&sums)[block_n / 8][4], int slices,
                                                const StageMemory<block_n>& memory,
                                                hopper::Ring<StageMemory<block_n>::stages>& ring,
                                                int consumer) {
    int previous = -1;
    const auto give_back = [&] {
        __syncwarp();
        if (tiles::lane_index() == 0) hopper::arrive(memory.empty(previous));
    };
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
        const uint32_t left = memory.left(ring.stage()), right = memory.right(ring.stage());
        hopper::wait(memory.full(ring.stage()), ring.parity());
        hopper::begin_products();
#pragma unroll
        for (int k = 0; k < depth / 16; ++k) {
            uint64_t a, b;
            if constexpr (left_across)
                a = hopper::across_rows<depth>(left, k, consumer * 64);
            else
                a = hopper::along_rows<tile_rows>(left, k, consumer * 64);
            if constexpr (right_across)
                b = hopper::across_rows<depth>(right, k);
            else
                b = hopper::along_rows<block_n>(right, k);
            hopper::multiply<left_across, right_across>(sums, a, b);
        }
        hopper::end_products();
        hopper::wait_for_products<1>();
        if (previous >= 0) give_back();
        previous = ring.stage();
        ring.advance();
    }
    hopper::wait_for_products<0>();
    hopper::settle(sums);
    if (previous >= 0) give_back();
}

struct RowsMaps {
    CUtensorMap in, w;  // in: not used where rows are gathered
};

/// out [R, n] = in [R, k] ∘ w_e (+ bias_e)
struct RowsArgs {
    Element* out;
    const Element *in, *bias;            // bias may be null
    const int32_t *offsets, *row_token;  // row_token may be null
    int E, n, k;
};

/// weight_along: w_e is [k, n], else [n, k].
template <int block_n, bool weight_along>
__global__ void __launch_bounds__(threads, 1)
    rows_kernel(const __grid_constant__ RowsMaps maps, const RowsArgs a) {
    using Memory = StageMemory<block_n>;
    extern __shared__ char shared[];
    const Memory memory{tiles_begin(shared)};
    int* const first_tiles = reinterpret_cast<int*>(
        shared + (memory.begin - tiles::shared_address(shared)) + Memory::end);
    if (threadIdx.x == 0) memory.init();
    const experts::RowTiles row_tiles(first_tiles, a.offsets, a.E, tile_rows);
    const int blocks = (a.n + block_n - 1) / block_n, slices = (a.k + depth - 1) / depth;
    const int64_t count = int64_t{row_tiles.count()} * blocks;
    hopper::Ring<Memory::stages> ring;
    const int group = static_cast<int>(threadIdx.x) / group_threads;
    if (group == 0) {
        hopper::give_registers<producer_registers>();
        Reports<block_n> reports(memory);
#pragma unroll 1
        for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
            const experts::RowTile at = row_tiles.find(index, blocks, band);
            const int column = static_cast<int>(at.block) * block_n;
            int rows[tile_rows / rows_at_once] = {};
            if (a.row_token) {
#pragma unroll
                for (int i = 0; i < tile_rows / rows_at_once; ++i)
                    rows[i] =
                        a.row_token[at.first_row + min(copy_row() + i * rows_at_once, at.rows - 1)];
            }
#pragma unroll 1
            for (int slice = 0; slice < slices; ++slice) {
                const uint32_t full = memory.full(ring.stage());
                const int d = slice * depth;
                hopper::wait(memory.empty(ring.stage()), ring.parity() ^ 1);
                if (tiles::thread_index() == 0) {
                    hopper::arrive_expecting(
                        full, a.row_token ? Memory::right_bytes : Memory::stage_bytes);
                    if (!a.row_token)
                        hopper::load_box(memory.left(ring.stage()), maps.in, full,
                                         int3{d, at.first_row, 0});
                    if constexpr (weight_along) {
#pragma unroll
                        for (int p = 0; p < block_n / hopper::panel_columns; ++p)
                            hopper::load_box(
                                memory.right(ring.stage()) + p * hopper::panel_bytes(depth), maps.w,
                                full, int3{column + p * hopper::panel_columns, d, at.expert});
                    } else {
                        hopper::load_box(memory.right(ring.stage()), maps.w, full,
                                         int3{d, column, at.expert});
                    }
                }
                if (a.row_token) {
                    const int k = d + copy_chunk() * 8;
#pragma unroll
                    for (int i = 0; i < tile_rows / rows_at_once; ++i)
                        tiles::copy_async(
                            memory.left(ring.stage()) +
                                hopper::chunk_offset(copy_row() + i * rows_at_once, copy_chunk()),
                            a.in + (k < a.k ? int64_t{rows[i]} * a.k + k : 0), k < a.k);
                }
                reports.started(ring.stage(), a.row_token != nullptr);
                ring.advance();
            }
        }
        reports.finish();
    } else {
        hopper::take_registers<consumer_registers>();
        const int consumer = group - 1;
#pragma unroll 1
        for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
            const experts::RowTile at = row_tiles.find(index, blocks, band);
            const int column = static_cast<int>(at.block) * block_n;
            float sums[1][block_n / 8][4] = {};
            multiply_slices<block_n, false, weight_along>(sums[0], slices, memory, ring, consumer);
            const int lane = tiles::lane_index(), row = consumer * 64 + tiles::warp_index() * 16;
            if (a.bias) {
                const Element* const bias = a.bias + int64_t{at.expert} * a.n;
#pragma unroll
                for (int c = 0; c < block_n / 8; ++c) {
                    const int col = column + c * 8 + lane % 4 * 2;
                    const float low = col < a.n ? to_float(bias[col]) : 0.0f,
                                high = col < a.n ? to_float(bias[col + 1]) : 0.0f;
                    sums[0][c][0] += low;
                    sums[0][c][1] += high;
                    sums[0][c][2] += low;
                    sums[0][c][3] += high;
                }
            }
            tiles::store_rows<block_n>({a.out + int64_t{at.first_row + row} * a.n + column, a.n,
                                        at.rows - row, a.n - column},
                                       lane, sums, 1.0f);
        }
    }
}

struct SumMaps {
    CUtensorMap dy, x;  // x: not used where rows are gathered
};

/// dw_e [N, K] (+)= dy_eᵀ·x_e
struct SumArgs {
    float* dw;
    const Element *dy, *x;
    const int32_t *offsets, *row_token;  // row_token may be null
    int E, N, K;
    bool accumulate;
};

/// Starts copying 64 rows of block_n columns, as panels; zeros for rows from `rows` on. row(i): row
/// i of the operand.
template <int block_n, class Row>
__device__ __forceinline__ void copy_slice(uint32_t to, const Element* from, int64_t stride,
                                           int rows, int columns, const Row& row) {
#pragma unroll 1
    for (int i = copy_row(); i < depth; i += rows_at_once) {
        const Element* const at = from + (i < rows ? row(i) * stride : 0);
#pragma unroll
        for (int p = 0; p < block_n / hopper::panel_columns; ++p) {
            const int column = p * hopper::panel_columns + copy_chunk() * 8;
            const bool valid = i < rows && column < columns;
            tiles::copy_async(
                to + p * hopper::panel_bytes(depth) + hopper::chunk_offset(i, copy_chunk()),
                valid ? at + column : from, valid);
        }
    }
}

template <int block_n>
__global__ void __launch_bounds__(threads, 1)
    sums_kernel(const __grid_constant__ SumMaps maps, const SumArgs a) {
    using Memory = StageMemory<block_n>;
    extern __shared__ char shared[];
    const Memory memory{tiles_begin(shared)};
    uint16_t* const order = reinterpret_cast<uint16_t*>(
        shared + (memory.begin - tiles::shared_address(shared)) + Memory::end);
    // Counts lie where the first stage will.
    experts::sort_experts(
        order, reinterpret_cast<int*>(shared + (memory.begin - tiles::shared_address(shared))),
        a.offsets, a.E);
    if (threadIdx.x == 0) memory.init();
    // The copy engine overwrites what these threads wrote.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const int row_blocks = (a.N + tile_rows - 1) / tile_rows,
              col_blocks = (a.K + block_n - 1) / block_n;
    const int64_t of_expert = int64_t{row_blocks} * col_blocks, count = of_expert * a.E;
    hopper::Ring<Memory::stages> ring;
    const int group = static_cast<int>(threadIdx.x) / group_threads;
    if (group == 0) {
        hopper::give_registers<producer_registers>();
        Reports<block_n> reports(memory);
#pragma unroll 1
        for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
            const int expert = order[index / of_expert],
                      block = static_cast<int>(index % of_expert);
            const int n0 = block % row_blocks * tile_rows, k0 = block / row_blocks * block_n;
            const int first = a.offsets[expert], rows = a.offsets[expert + 1] - first;
#pragma unroll 1
            for (int row = 0; row < rows; row += depth) {
                const uint32_t full = memory.full(ring.stage());
                // The copy engine would also copy rows of the next expert.
                const bool boxes = row + depth <= rows, gathers = a.row_token != nullptr;
                hopper::wait(memory.empty(ring.stage()), ring.parity() ^ 1);
                if (tiles::thread_index() == 0) {
                    hopper::arrive_expecting(full, !boxes    ? 0
                                                   : gathers ? Memory::left_bytes
                                                             : Memory::stage_bytes);
                    if (boxes) {
#pragma unroll
                        for (int p = 0; p < tile_rows / hopper::panel_columns; ++p)
                            hopper::load_box(
                                memory.left(ring.stage()) + p * hopper::panel_bytes(depth), maps.dy,
                                full, int3{n0 + p * hopper::panel_columns, first + row, 0});
                        if (!gathers) {
#pragma unroll
                            for (int p = 0; p < block_n / hopper::panel_columns; ++p)
                                hopper::load_box(
                                    memory.right(ring.stage()) + p * hopper::panel_bytes(depth),
                                    maps.x, full,
                                    int3{k0 + p * hopper::panel_columns, first + row, 0});
                        }
                    }
                }
                if (!boxes)
                    copy_slice<tile_rows>(memory.left(ring.stage()), a.dy + n0, a.N, rows - row,
                                          a.N - n0,
                                          [&](int i) -> int64_t { return first + row + i; });
                if (!boxes || gathers)
                    copy_slice<block_n>(memory.right(ring.stage()), a.x + k0, a.K, rows - row,
                                        a.K - k0, [&](int i) -> int64_t {
                                            return gathers ? a.row_token[first + row + i]
                                                           : first + row + i;
                                        });
                reports.started(ring.stage(), !boxes || gathers);
                ring.advance();
            }
        }
        reports.finish();
    } else {
        hopper::take_registers<consumer_registers>();
        const int consumer = group - 1;
#pragma unroll 1
        for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
            const int expert = order[index / of_expert],
                      block = static_cast<int>(index % of_expert);
            const int n = block % row_blocks * tile_rows + consumer * 64 + tiles::warp_index() * 16,
                      k = block / row_blocks * block_n;
            const int rows = a.offsets[expert + 1] - a.offsets[expert];
            if (rows == 0 && a.accumulate) continue;
            float sums[1][block_n / 8][4] = {};
            multiply_slices<block_n, true, true>(sums[0], (rows + depth - 1) / depth, memory, ring,
                                                 consumer);
            tiles::store_rows<block_n>(
                {a.dw + (int64_t{expert} * a.N + n) * a.K + k, a.K, a.N - n, a.K - k},
                tiles::lane_index(), sums, 1.0f, a.accumulate);
        }
    }
}

/// Calls f with the columns of a tile.
template <class F>
void with_block(int block_n, F&& f) {
    if (block_n == 256)
        f(std::integral_constant<int, 256>{});
    else
        f(std::integral_constant<int, 128>{});
}

/// Of rows [R, columns].
std::optional<CUtensorMap> map_of_rows(const Tensor& rows, int box_rows) {
    return tensor_map({.data = rows.data,
                       .extents = {rows.cols(), rows.rows(), 1},
                       .strides = {rows.cols(), 0},
                       .box_rows = box_rows});
}

template <bool weight_along>
bool launch_rows(Stream& stream, int block_n, const GroupedLinearForward& args) {
    const int64_t R = args.out.rows(), n = args.out.cols(), k = args.x.cols(),
                  E = args.offsets.numel() - 1;
    const auto in = map_of_rows(args.x, tile_rows);
    const auto w = tensor_map({.data = args.w.values.data,
                               .extents = {weight_along ? n : k, weight_along ? k : n, E},
                               .strides = {weight_along ? n : k, n * k},
                               .box_rows = weight_along ? depth : block_n});
    if (!in || !w) return false;
    with_block(block_n, [&](auto block) {
        launch(
            stream, rows_kernel<block, weight_along>, shared_bytes<block>,
            experts::most_row_tiles(R, E, tile_rows) * ceil_div<int64_t>(n, block),
            RowsMaps{*in, *w},
            RowsArgs{static_cast<Element*>(args.out.data), static_cast<const Element*>(args.x.data),
                     static_cast<const Element*>(args.bias.data),
                     static_cast<const int32_t*>(args.offsets.data),
                     static_cast<const int32_t*>(args.row_token.data), static_cast<int>(E),
                     static_cast<int>(n), static_cast<int>(k)});
    });
    return true;
}

}  // namespace

bool wgmma_forward(Stream& stream, const GroupedLinearForward& args, int block_n) {
    return launch_rows<false>(stream, block_n, args);
}

bool wgmma_backward_input(Stream& stream, const GroupedLinearBackwardInput& args, int block_n) {
    return launch_rows<true>(stream, block_n, as_forward(args));
}

bool wgmma_backward_weight(Stream& stream, const GroupedLinearBackwardWeight& args, int block_n) {
    const int64_t N = args.dy.cols(), K = args.x.cols(), E = args.offsets.numel() - 1;
    const auto dy = map_of_rows(args.dy, depth), x = map_of_rows(args.x, depth);
    if (!dy || !x) return false;
    with_block(block_n, [&](auto block) {
        launch(stream, sums_kernel<block>, shared_bytes<block>,
               E * ceil_div<int64_t>(N, tile_rows) * ceil_div<int64_t>(K, block), SumMaps{*dy, *x},
               SumArgs{static_cast<float*>(args.dw.data), static_cast<const Element*>(args.dy.data),
                       static_cast<const Element*>(args.x.data),
                       static_cast<const int32_t*>(args.offsets.data),
                       static_cast<const int32_t*>(args.row_token.data), static_cast<int>(E),
                       static_cast<int>(N), static_cast<int>(K), args.dw.accumulate});
    });
    return true;
}

bool wgmma_is_built() { return true; }

#else

bool wgmma_forward(Stream&, const GroupedLinearForward&, int) { return false; }
bool wgmma_backward_input(Stream&, const GroupedLinearBackwardInput&, int) { return false; }
bool wgmma_backward_weight(Stream&, const GroupedLinearBackwardWeight&, int) { return false; }
bool wgmma_is_built() { return false; }

#endif

}  // namespace train_gpt::cuda
