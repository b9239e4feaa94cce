// Products of experts in fp8 with Hopper's own instructions, in tiles of 128×128. Slices of both
// operands, 128 codes deep, pass through a ring of stages (wgmma_stages.cuh). Both operands lie
// along the dimension that is summed over, which is how wgmma takes fp8.
//
// Hopper's tensor cores sum fp8 products with about 14 bits. So the products of a slice are summed
// by themselves, and these sums are added in fp32 (DeepSeek-AI, arXiv 2412.19437, section 3.3.2;
// cuBLASLt does likewise unless fast accumulation is on). While a warpgroup adds, the other's
// products run. 128×256 would need twice as many sums twice, which registers do not hold.
#include <cstdint>
#include <optional>
#include <type_traits>

#include "kernels/experts/grouped_fp8_rows.h"
#include "kernels/experts/wgmma_stages.cuh"
#include "kernels/fp8_math.h"
#include "kernels/tensor_map.h"

namespace train_gpt::cuda {

#ifdef TRAIN_GPT_SM90A

namespace {

using namespace wgmma_stages;

constexpr int tile_columns = 128, depth = stage_row_bytes, codes_of_copy = 16;
using Memory = StageMemory<tile_columns>;

struct Maps {
    CUtensorMap in, w;  // in: not used where rows are gathered
};

/// Fp8Rows for a kernel.
template <class Out>
struct Args {
    Out* out;
    const Out* bias;  // may be null
    const uint8_t* in;
    const float *in_inverse, *w_inverse;
    const int32_t *offsets, *row_token;  // row_token may be null
    int E, n, k;
};

__device__ __forceinline__ void store(tiles::Element* to, int64_t stride, int rows, int columns,
                                      const float (&sums)[1][tile_columns / 8][4]) {
    tiles::store_rows<tile_columns>({to, stride, rows, columns}, tiles::lane_index(), sums, 1.0f);
}
__device__ __forceinline__ void store(float* to, int64_t stride, int rows, int columns,
                                      const float (&sums)[1][tile_columns / 8][4]) {
    tiles::store_rows<tile_columns>({to, stride, rows, columns}, tiles::lane_index(), sums, 1.0f,
                                    false);
}

/// The producer: fills the stages with the slices of the block's tiles.
template <class Out>
__device__ __forceinline__ void load_slices(const Maps& maps, const Args<Out>& a,
                                            const experts::RowTiles& row_tiles, int blocks,
                                            int slices, const Memory& memory) {
    constexpr int copies = tile_rows / rows_at_once;
    const int64_t count = int64_t{row_tiles.count()} * blocks;
    hopper::Ring<Memory::stages> ring;
    Reports<tile_columns> reports(memory);
#pragma unroll 1
    for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
        const experts::RowTile at = row_tiles.find(index, blocks, band);
        const int column = static_cast<int>(at.block) * tile_columns;
        int rows[copies] = {};
        if (a.row_token) {
            // Rows beyond the last are copied from the last.
#pragma unroll
            for (int i = 0; i < copies; ++i)
                rows[i] =
                    a.row_token[at.first_row + min(copy_row() + i * rows_at_once, at.rows - 1)];
        }
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice) {
            const uint32_t full = memory.full(ring.stage());
            const int d = slice * depth;
            hopper::wait(memory.empty(ring.stage()), ring.parity() ^ 1);
            if (tiles::thread_index() == 0) {
                hopper::arrive_expecting(full,
                                         a.row_token ? Memory::right_bytes : Memory::stage_bytes);
                if (!a.row_token)
                    hopper::load_box(memory.left(ring.stage()), maps.in, full,
                                     int3{d, at.first_row, 0});
                hopper::load_box(memory.right(ring.stage()), maps.w, full,
                                 int3{d, column, at.expert});
            }
            if (a.row_token) {
                const int k = d + copy_chunk() * codes_of_copy;
#pragma unroll
                for (int i = 0; i < copies; ++i)
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
}

/// A consumer: the warpgroup's 64 rows of each of the block's tiles.
template <class Left, class Out>
__device__ __forceinline__ void multiply_slices(const Args<Out>& a,
                                                const experts::RowTiles& row_tiles, int blocks,
                                                int slices, const Memory& memory, int consumer) {
    const int64_t count = int64_t{row_tiles.count()} * blocks;
    const float factor = *a.in_inverse * *a.w_inverse;
    hopper::Ring<Memory::stages> ring;
#pragma unroll 1
    for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
        const experts::RowTile at = row_tiles.find(index, blocks, band);
        float sums[1][tile_columns / 8][4] = {};
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice) {
            float of_slice[tile_columns / 8][4];
            const uint32_t left = memory.left(ring.stage()), right = memory.right(ring.stage());
            hopper::wait(memory.full(ring.stage()), ring.parity());
            hopper::begin_products();
#pragma unroll
            for (int step = 0; step < depth / hopper::codes_of_product; ++step)
                hopper::multiply_codes<std::is_same_v<Left, E5M2>>(
                    of_slice, hopper::along_rows<tile_rows>(left, step, consumer * 64),
                    hopper::along_rows<tile_columns>(right, step), step > 0);
            hopper::end_products();
            hopper::wait_for_products<0>();
            hopper::settle(of_slice);
            __syncwarp();
            if (tiles::lane_index() == 0) hopper::arrive(memory.empty(ring.stage()));
            ring.advance();
#pragma unroll
            for (int c = 0; c < tile_columns / 8; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[0][c][i] += of_slice[c][i];
        }
        const int column = static_cast<int>(at.block) * tile_columns,
                  row = consumer * 64 + tiles::warp_index() * 16;
        const Out* const bias = a.bias ? a.bias + int64_t{at.expert} * a.n : nullptr;
#pragma unroll
        for (int c = 0; c < tile_columns / 8; ++c) {
            const int col = column + c * 8 + tiles::lane_index() % 4 * 2;
            const bool adds = bias && col < a.n;
            const float low = adds ? to_float(bias[col]) : 0.0f,
                        high = adds ? to_float(bias[col + 1]) : 0.0f;
            float(&sum)[4] = sums[0][c];
            sum[0] = sum[0] * factor + low;
            sum[1] = sum[1] * factor + high;
            sum[2] = sum[2] * factor + low;
            sum[3] = sum[3] * factor + high;
        }
        store(a.out + int64_t{at.first_row + row} * a.n + column, a.n, at.rows - row, a.n - column,
              sums);
    }
}

template <class Left, class Out>
__global__ void __launch_bounds__(threads, 1)
    fp8_rows_kernel(const __grid_constant__ Maps maps, const Args<Out> a) {
    extern __shared__ char shared[];
    const Memory memory{tiles_begin(shared)};
    int* const first_tiles = reinterpret_cast<int*>(
        shared + (memory.begin - tiles::shared_address(shared)) + Memory::end);
    if (threadIdx.x == 0) memory.init();
    const experts::RowTiles row_tiles(first_tiles, a.offsets, a.E, tile_rows);
    const int blocks = (a.n + tile_columns - 1) / tile_columns, slices = (a.k + depth - 1) / depth,
              group = static_cast<int>(threadIdx.x) / group_threads;
    if (group == 0) {
        hopper::give_registers<producer_registers>();
        load_slices(maps, a, row_tiles, blocks, slices, memory);
    } else {
        hopper::take_registers<consumer_registers>();
        multiply_slices<Left>(a, row_tiles, blocks, slices, memory, group - 1);
    }
}

template <class Left, class Out>
void submit(Stream& stream, const Maps& maps, const Fp8Rows& rows) {
    launch(stream, fp8_rows_kernel<Left, Out>, shared_bytes<tile_columns>,
           experts::most_row_tiles(rows.out.rows(), rows.experts(), tile_rows) *
               ceil_div<int64_t>(rows.n(), tile_columns),
           maps,
           Args<Out>{static_cast<Out*>(rows.out.data), static_cast<const Out*>(rows.bias.data),
                     static_cast<const uint8_t*>(rows.in.data), rows.in_inverse, rows.w_inverse,
                     static_cast<const int32_t*>(rows.offsets.data),
                     static_cast<const int32_t*>(rows.row_token.data),
                     static_cast<int>(rows.experts()), static_cast<int>(rows.n()),
                     static_cast<int>(rows.k())});
}

}  // namespace

bool wgmma_fp8_rows(Stream& stream, const Fp8Rows& rows) {
    const auto in = tensor_map({.data = rows.in.data,
                                .extents = {rows.k(), rows.in.rows(), 1},
                                .strides = {rows.k(), 0},
                                .box_rows = tile_rows,
                                .element_bytes = 1});
    const auto w = tensor_map({.data = rows.w,
                               .extents = {rows.k(), rows.n(), rows.experts()},
                               .strides = {rows.w_row, rows.w_expert},
                               .box_rows = tile_columns,
                               .element_bytes = 1});
    if (!in || !w) return false;
    with_element_type(rows.out.dtype, [&](auto type) {
        using Out = decltype(type);
        if (rows.format == Fp8Format::e4m3)
            submit<E4M3, Out>(stream, {*in, *w}, rows);
        else
            submit<E5M2, Out>(stream, {*in, *w}, rows);
    });
    return true;
}

#else

bool wgmma_fp8_rows(Stream&, const Fp8Rows&) { return false; }

#endif

}  // namespace train_gpt::cuda
