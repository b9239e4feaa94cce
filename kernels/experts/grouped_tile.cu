// Grouped products with mma.sync. Blocks stay on the GPU and take tiles of 128×128 in turn. Slices
// of both operands, 64 elements deep, pass through three stages of shared memory, so that two
// slices are on their way while one is multiplied; two blocks share a multiprocessor, and one
// multiplies while the other fills its stages or writes a tile. Each warp has 64×64 sums: fragments
// of 128 rows and columns then feed 32 products, which keeps mma.sync as busy as shared memory can.
#include <algorithm>
#include <cstdint>

#include "kernels/attention/tile.cuh"
#include "kernels/experts/group_tiles.cuh"
#include "kernels/experts/grouped_tile.h"

namespace train_gpt::cuda {

namespace {

using tiles::Element;
using tiles::SwizzledTile;

constexpr int edge = 128, depth = 64, stages = 3, warp_edge = 64;
constexpr int operand_bytes = edge * depth * int{sizeof(Element)}, stage_bytes = 2 * operand_bytes;
constexpr int threads = tiles::threads, warp_tiles = warp_edge / 16;
/// Tiles of an expert's rows that run beside each other (RowTiles::find).
constexpr int band = 16;

/// How a slice of an operand lies in memory and in shared memory: `edge` rows of `depth` elements,
/// or (along) `depth` rows of `edge` elements.
template <bool along>
using Slice = SwizzledTile<along ? edge : depth>;

/// Copies of a thread to a slice: 16 bytes of each of so many rows.
template <bool along>
struct SliceCopies {
    static constexpr int chunks = Slice<along>::chunks, rows_at_once = threads / chunks,
                         count = (along ? depth : edge) / rows_at_once;

    static __device__ __forceinline__ int row() { return tiles::thread_index() / chunks; }
    static __device__ __forceinline__ int chunk() { return tiles::thread_index() % chunks; }
    /// The thread's copy i; the swizzle repeats every 8 rows.
    static __device__ __forceinline__ uint32_t place(int i) {
        static_assert(rows_at_once % 8 == 0);
        return Slice<along>::offset(row(), chunk()) + Slice<along>::bytes(i * rows_at_once);
    }
};

/// The fragments of 64 rows or columns, 16 deep.
struct Fragments {
    uint32_t of[warp_tiles][4];
};

/// A left operand: rows are those of the product.
template <bool along>
struct Left {
    /// The lane's address for the warp's rows.
    static __device__ __forceinline__ uint32_t origin(int lane, int first) {
        if constexpr (along)
            return Slice<true>::submatrix(tiles::lane_offset_right<edge>(lane), 0, first / 16);
        else
            return tiles::lane_offset_down<depth>(lane) + Slice<false>::bytes(first);
    }
    static __device__ __forceinline__ void load(Fragments& to, uint32_t from, int step) {
#pragma unroll
        for (int m = 0; m < warp_tiles; ++m) {
            if constexpr (along)
                tiles::load_fragment_transposed(to.of[m], Slice<true>::submatrix(from, step, m));
            else
                tiles::load_fragment(to.of[m], Slice<false>::submatrix(from, m, step));
        }
    }
};

/// A right operand: rows are the columns of the product. A fragment has two of 8 columns.
template <bool along>
struct Right {
    static __device__ __forceinline__ uint32_t origin(int lane, int first) {
        if constexpr (along)
            return Slice<true>::submatrix(tiles::lane_offset_down<edge>(lane), 0, first / 16);
        else
            return tiles::lane_offset_right<depth>(lane) + Slice<false>::bytes(first);
    }
    static __device__ __forceinline__ void load(Fragments& to, uint32_t from, int step) {
        Left<along>::load(to, from, step);
    }
};

using Sums = float[warp_tiles][2 * warp_tiles][4];

__device__ __forceinline__ void multiply_fragments(Sums& sums, const Fragments& left,
                                                   const Fragments& right) {
#pragma unroll
    for (int m = 0; m < warp_tiles; ++m) {
#pragma unroll
        for (int n = 0; n < warp_tiles; ++n) {
            tiles::multiply_add(sums[m][2 * n], left.of[m], right.of[n][0], right.of[n][1]);
            tiles::multiply_add(sums[m][2 * n + 1], left.of[m], right.of[n][2], right.of[n][3]);
        }
    }
}

/// sums += the product of a stage. The fragments of a step are loaded while the step before is
/// multiplied.
template <bool left_along, bool right_along>
__device__ __forceinline__ void multiply_stage(Sums& sums, uint32_t left, uint32_t right) {
    constexpr int steps = depth / 16;
    Fragments a[2], b[2];
    Left<left_along>::load(a[0], left, 0);
    Right<right_along>::load(b[0], right, 0);
#pragma unroll
    for (int step = 0; step < steps; ++step) {
        if (step + 1 < steps) {
            Left<left_along>::load(a[(step + 1) % 2], left, step + 1);
            Right<right_along>::load(b[(step + 1) % 2], right, step + 1);
        }
        multiply_fragments(sums, a[step % 2], b[step % 2]);
    }
}

template <int pending>
__device__ __forceinline__ void wait_for_stage() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
    __syncthreads();
}
__device__ __forceinline__ void commit_stage() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Addresses in shared memory: of the stages, and of the warp's operands within a stage.
struct TileAddresses {
    uint32_t stages, left, right;
};

/// Runs through the slices of a tile. load(slice, stage address) starts the copies of a slice;
/// multiplies: whether the warp has rows at all.
template <bool left_along, bool right_along, class Load>
__device__ __forceinline__ void multiply_tile(Sums& sums, const TileAddresses& at, int slices,
                                              bool multiplies, Load&& load) {
#pragma unroll
    for (int s = 0; s < stages - 1; ++s) {
        if (s < slices) load(s, at.stages + s * stage_bytes);
        commit_stage();
    }
    int stage = 0, next = stages - 1;
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
        wait_for_stage<stages - 2>();
        // All warps have multiplied the slice before, whose stage the next copies may overwrite.
        if (slice + stages - 1 < slices) load(slice + stages - 1, at.stages + next * stage_bytes);
        commit_stage();
        const uint32_t base = at.stages + stage * stage_bytes;
        if (multiplies)
            multiply_stage<left_along, right_along>(sums, base + at.left,
                                                    base + operand_bytes + at.right);
        stage = stage + 1 == stages ? 0 : stage + 1;
        next = next + 1 == stages ? 0 : next + 1;
    }
    __syncthreads();  // the next tile's copies overwrite the stages
}

/// out [R, n] = in [R, k] ∘ w_e (+ bias_e)
struct RowsArgs {
    Element* out;
    const Element *in, *w, *bias;        // bias may be null
    const int32_t *offsets, *row_token;  // row_token may be null
    int E, n, k;
};

/// weight_along: w_e is [k, n], else [n, k].
template <bool weight_along>
__global__ void __launch_bounds__(threads, 2) rows_kernel(RowsArgs a) {
    extern __shared__ __align__(128) unsigned char memory[];
    int* const rows_of_tile = reinterpret_cast<int*>(memory + stages * stage_bytes);
    int* const first_tiles = rows_of_tile + edge;
    const experts::RowTiles tiles(first_tiles, a.offsets, a.E, edge);
    const uint32_t shared = tiles::shared_address(memory);
    const int warp = tiles::warp_index(), lane = tiles::lane_index(),
              warp_row = warp / 2 * warp_edge, warp_col = warp % 2 * warp_edge;
    const uint32_t left = Left<false>::origin(lane, warp_row),
                   right = Right<weight_along>::origin(lane, warp_col);
    const int blocks = (a.n + edge - 1) / edge;
    const int64_t count = int64_t{tiles.count()} * blocks;
#pragma unroll 1
    for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
        const experts::RowTile at = tiles.find(index, blocks, band);
        const int column = static_cast<int>(at.block) * edge;
        // Rows beyond the last are copied from the last.
        const int own_row = at.first_row + min(tiles::thread_index(), at.rows - 1);
        rows_of_tile[tiles::thread_index()] = a.row_token ? a.row_token[own_row] : own_row;
        __syncthreads();

        using RowCopies = SliceCopies<false>;
        using WeightCopies = SliceCopies<weight_along>;
        const Element* const w = a.w + int64_t{at.expert} * a.n * a.k;
        const auto load = [&](int slice, uint32_t stage) {
            const int k = slice * depth + RowCopies::chunk() * 8;
#pragma unroll
            for (int i = 0; i < RowCopies::count; ++i) {
                const int64_t row = rows_of_tile[RowCopies::row() + i * RowCopies::rows_at_once];
                tiles::copy_async(stage + RowCopies::place(i), a.in + (k < a.k ? row * a.k + k : 0),
                                  k < a.k);
            }
#pragma unroll
            for (int i = 0; i < WeightCopies::count; ++i) {
                const int row = WeightCopies::row() + i * WeightCopies::rows_at_once,
                          col = WeightCopies::chunk() * 8;
                const int n = column + (weight_along ? col : row),
                          d = slice * depth + (weight_along ? row : col);
                const bool valid = n < a.n && d < a.k;
                const int64_t from = weight_along ? int64_t{d} * a.n + n : int64_t{n} * a.k + d;
                tiles::copy_async(stage + operand_bytes + WeightCopies::place(i),
                                  w + (valid ? from : 0), valid);
            }
        };
        Sums sums = {};
        multiply_tile<false, weight_along>(sums, {shared, left, right}, (a.k + depth - 1) / depth,
                                           warp_row < at.rows, load);

        const int n = column + warp_col;
        if (a.bias) {
            const Element* const bias = a.bias + int64_t{at.expert} * a.n;
#pragma unroll
            for (int c = 0; c < 2 * warp_tiles; ++c) {
                const int col = n + c * 8 + lane % 4 * 2;
                const float low = col < a.n ? to_float(bias[col]) : 0.0f,
                            high = col < a.n ? to_float(bias[col + 1]) : 0.0f;
#pragma unroll
                for (int m = 0; m < warp_tiles; ++m) {
                    sums[m][c][0] += low;
                    sums[m][c][1] += high;
                    sums[m][c][2] += low;
                    sums[m][c][3] += high;
                }
            }
        }
        tiles::store_rows<warp_edge>(
            {a.out + int64_t{at.first_row + warp_row} * a.n + n, a.n, at.rows - warp_row, a.n - n},
            lane, sums, 1.0f);
    }
}

/// dw_e [N, K] (+)= dy_eᵀ·x_e
struct SumArgs {
    float* dw;
    const Element *dy, *x;
    const int32_t *offsets, *row_token;  // row_token may be null
    int E, N, K;
    bool accumulate;
};

constexpr int row_rings = 4;  // slices whose rows of x are known or on their way

__global__ void __launch_bounds__(threads, 2) sums_kernel(SumArgs a) {
    extern __shared__ __align__(128) unsigned char memory[];
    int* const row_ring = reinterpret_cast<int*>(memory + stages * stage_bytes);
    uint16_t* const order = reinterpret_cast<uint16_t*>(row_ring + row_rings * depth);
    experts::sort_experts(order, reinterpret_cast<int*>(memory), a.offsets, a.E);
    const uint32_t shared = tiles::shared_address(memory);
    const int warp = tiles::warp_index(), lane = tiles::lane_index(),
              warp_row = warp / 2 * warp_edge, warp_col = warp % 2 * warp_edge;
    const uint32_t left = Left<true>::origin(lane, warp_row),
                   right = Right<true>::origin(lane, warp_col);
    const int row_blocks = (a.N + edge - 1) / edge, col_blocks = (a.K + edge - 1) / edge;
    const int64_t of_expert = int64_t{row_blocks} * col_blocks, count = of_expert * a.E;
#pragma unroll 1
    for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
        const int expert = order[index / of_expert];
        const int block = static_cast<int>(index % of_expert);
        const int n0 = block % row_blocks * edge, k0 = block / row_blocks * edge;
        const int first = a.offsets[expert], rows = a.offsets[expert + 1] - first;
        if (rows == 0 && a.accumulate) continue;

        // A thread asks for one row of x of each slice, two slices before it is copied.
        const bool asks = tiles::thread_index() < depth;
        const auto row_of = [&](int slice) {
            const int row = slice * depth + tiles::thread_index();
            if (!asks || row >= rows) return 0;
            return a.row_token ? a.row_token[first + row] : first + row;
        };
        const auto keep_row = [&](int slice, int row) {
            if (asks) row_ring[slice % row_rings * depth + tiles::thread_index()] = row;
        };
        for (int slice = 0; slice < stages; ++slice) keep_row(slice, row_of(slice));
        int next_row = row_of(stages);
        __syncthreads();

        using Copies = SliceCopies<true>;
        const int col = Copies::chunk() * 8;
        const bool n_valid = n0 + col < a.N, k_valid = k0 + col < a.K;
        const auto load = [&](int slice, uint32_t stage) {
#pragma unroll
            for (int i = 0; i < Copies::count; ++i) {
                const int d = Copies::row() + i * Copies::rows_at_once, row = slice * depth + d;
                const bool valid = row < rows;
                const int64_t dy_row = first + row, x_row = row_ring[slice % row_rings * depth + d];
                tiles::copy_async(stage + Copies::place(i),
                                  a.dy + (valid && n_valid ? dy_row * a.N + n0 + col : 0),
                                  valid && n_valid);
                tiles::copy_async(stage + operand_bytes + Copies::place(i),
                                  a.x + (valid && k_valid ? x_row * a.K + k0 + col : 0),
                                  valid && k_valid);
            }
            if (slice < stages - 1) return;  // the rows of the next slices are already there
            // Known to all threads after the barrier before slice + 1 is copied.
            keep_row(slice + 1, next_row);
            next_row = row_of(slice + 2);
        };
        Sums sums = {};
        multiply_tile<true, true>(sums, {shared, left, right}, (rows + depth - 1) / depth, true,
                                  load);
        const int n = n0 + warp_row, k = k0 + warp_col;
        tiles::store_rows<warp_edge>(
            {a.dw + (int64_t{expert} * a.N + n) * a.K + k, a.K, a.N - n, a.K - k}, lane, sums, 1.0f,
            a.accumulate);
    }
}

/// Blocks that are on the GPU at the same time, but no more than there are tiles.
template <class Kernel>
unsigned grid_for(const Stream& stream, Kernel* kernel, int shared_bytes, int64_t tile_count) {
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    int blocks = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads,
                                                             static_cast<size_t>(shared_bytes)));
    const int64_t multiprocessors =
        std::max(1, limits_of(stream).multiprocessors - stream.settings.reserved_sms);
    return static_cast<unsigned>(std::min(multiprocessors * std::max(blocks, 1), tile_count));
}

constexpr int rows_shared_bytes =
    stages * stage_bytes + (edge + most_experts + 1) * int{sizeof(int)};
constexpr int sums_shared_bytes = stages * stage_bytes + row_rings * depth * int{sizeof(int)} +
                                  most_experts * int{sizeof(uint16_t)};
static_assert(rows_shared_bytes <= tiles::shared_bytes_limit &&
              sums_shared_bytes <= tiles::shared_bytes_limit);

template <bool weight_along>
void launch_rows(Stream& stream, const GroupedLinearForward& args) {
    const int64_t R = args.out.rows(), n = args.out.cols(), E = args.offsets.numel() - 1;
    const int64_t tile_count = experts::most_row_tiles(R, E, edge) * ceil_div<int64_t>(n, edge);
    const unsigned grid =
        grid_for(stream, rows_kernel<weight_along>, rows_shared_bytes, tile_count);
    rows_kernel<weight_along><<<grid, threads, rows_shared_bytes, stream_of(stream)>>>(
        {static_cast<Element*>(args.out.data), static_cast<const Element*>(args.x.data),
         static_cast<const Element*>(args.w.values.data),
         static_cast<const Element*>(args.bias.data),
         static_cast<const int32_t*>(args.offsets.data),
         static_cast<const int32_t*>(args.row_token.data), static_cast<int>(E), static_cast<int>(n),
         static_cast<int>(args.x.cols())});
    CUDA_CHECK_LAUNCH();
}

template <class... Tensors>
bool supports(DType dtype, int64_t N, int64_t K, const Tensors&... tensors) {
    return dtype == DType::bf16 && N % 8 == 0 && K % 8 == 0 && (is_aligned(tensors.data) && ...);
}

}  // namespace

bool tile_supports(const GroupedLinearForward& args) {
    return supports(args.x.dtype, args.out.cols(), args.x.cols(), args.out, args.x, args.w.values);
}
bool tile_supports(const GroupedLinearBackwardInput& args) {
    return supports(args.dy.dtype, args.dy.cols(), args.dx.cols(), args.dx, args.dy, args.w.values);
}
bool tile_supports(const GroupedLinearBackwardWeight& args) {
    return supports(args.dy.dtype, args.dy.cols(), args.x.cols(), args.dw, args.dy, args.x);
}

void tile_forward(Stream& stream, const GroupedLinearForward& args) {
    launch_rows<false>(stream, args);
}

void tile_backward_input(Stream& stream, const GroupedLinearBackwardInput& args) {
    launch_rows<true>(stream, as_forward(args));
}

void tile_backward_weight(Stream& stream, const GroupedLinearBackwardWeight& args) {
    const int64_t N = args.dy.cols(), K = args.x.cols(), E = args.offsets.numel() - 1;
    const int64_t tile_count = E * ceil_div<int64_t>(N, edge) * ceil_div<int64_t>(K, edge);
    const unsigned grid = grid_for(stream, sums_kernel, sums_shared_bytes, tile_count);
    sums_kernel<<<grid, threads, sums_shared_bytes, stream_of(stream)>>>(
        {static_cast<float*>(args.dw.data), static_cast<const Element*>(args.dy.data),
         static_cast<const Element*>(args.x.data), static_cast<const int32_t*>(args.offsets.data),
         static_cast<const int32_t*>(args.row_token.data), static_cast<int>(E), static_cast<int>(N),
         static_cast<int>(K), args.dw.accumulate});
    CUDA_CHECK_LAUNCH();
}

}  // namespace train_gpt::cuda
