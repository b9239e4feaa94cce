// Grouped products: bf16 layers whose sizes and addresses allow 16-byte copies go to the tensor
// cores (grouped_tile.cu); the kernels here take any layer.
#include <algorithm>
#include <cstdint>

#include "base/error.h"
#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/experts/group_tiles.cuh"
#include "kernels/experts/grouped_linear.h"
#include "kernels/experts/grouped_tile.h"
#include "kernels/experts/grouped_ways.h"

namespace train_gpt::cuda {

namespace {

// A block of 16×16 threads computes a tile of 64×64; a thread has every 16th row and column of it.
constexpr int edge = 16, tile = 64, each = tile / edge, depth = 16, threads = edge * edge;

/// Two operands of a tile in shared memory: [depth][tile], with a gap against bank conflicts.
struct SharedTiles {
    float a[depth][tile + 1], b[depth][tile + 1];
};

/// sums += Σ_d a(row, d)·b(col, d) over [0, extent), in order. a and b give 0 outside.
template <class A, class B>
__device__ __forceinline__ void multiply(float (&sums)[each][each], SharedTiles& shared, int extent,
                                         const A& a, const B& b) {
    const int x = static_cast<int>(threadIdx.x) % edge, y = static_cast<int>(threadIdx.x) / edge;
    for (int first = 0; first < extent; first += depth) {
        __syncthreads();
#pragma unroll
        for (int i = static_cast<int>(threadIdx.x); i < depth * tile; i += threads) {
            // Neighbouring threads read what lies side by side.
            const int a_d = A::along ? i / tile : i % depth, a_i = A::along ? i % tile : i / depth;
            const int b_d = B::along ? i / tile : i % depth, b_i = B::along ? i % tile : i / depth;
            shared.a[a_d][a_i] = first + a_d < extent ? a(a_i, first + a_d) : 0.0f;
            shared.b[b_d][b_i] = first + b_d < extent ? b(b_i, first + b_d) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int d = 0; d < depth; ++d) {
            float left[each], right[each];
#pragma unroll
            for (int i = 0; i < each; ++i) left[i] = shared.a[d][y + i * edge];
#pragma unroll
            for (int i = 0; i < each; ++i) right[i] = shared.b[d][x + i * edge];
#pragma unroll
            for (int i = 0; i < each; ++i)
#pragma unroll
                for (int j = 0; j < each; ++j) sums[i][j] += left[i] * right[j];
        }
    }
}

/// Element (i, d) of an operand whose rows i are `stride` apart, or whose rows d are (along).
template <class T, bool along_>
struct Operand {
    static constexpr bool along = along_;
    const T* from;
    int64_t stride;
    int count;
    const int32_t* rows = nullptr;  // the row of each i, or of each d

    __device__ __forceinline__ float operator()(int i, int d) const {
        if (i >= count) return 0.0f;
        const int row = along ? d : i, col = along ? i : d;
        return to_float(from[(rows ? rows[row] : row) * stride + col]);
    }
};

/// out [R, n] = in [R, k] ∘ w_e (+ bias_e).
template <class T>
struct RowsArgs {
    T* out;
    const T *in, *w, *bias;              // bias may be null
    const int32_t *offsets, *row_token;  // row_token may be null
    int E, n, k;
};

template <class T, bool weight_along>
__global__ void __launch_bounds__(threads, 2) rows_kernel(RowsArgs<T> a) {
    __shared__ SharedTiles shared;
    __shared__ int first_tiles[most_experts + 1];
    const experts::RowTiles tiles(first_tiles, a.offsets, a.E, tile);
    if (blockIdx.x >= static_cast<unsigned>(tiles.count())) return;
    const experts::RowTile at = tiles.find(blockIdx.x, 1, 1);
    const int column = static_cast<int>(blockIdx.y) * tile;
    const T* const w = a.w + int64_t{at.expert} * a.n * a.k;
    float sums[each][each] = {};
    const int64_t first = at.first_row;
    const Operand<T, false> rows{a.row_token ? a.in : a.in + first * a.k, a.k, at.rows,
                                 a.row_token ? a.row_token + first : nullptr};
    const Operand<T, weight_along> columns{weight_along ? w + column : w + int64_t{column} * a.k,
                                           weight_along ? a.n : a.k, a.n - column};
    multiply(sums, shared, a.k, rows, columns);
    const int x = static_cast<int>(threadIdx.x) % edge, y = static_cast<int>(threadIdx.x) / edge;
#pragma unroll
    for (int i = 0; i < each; ++i)
#pragma unroll
        for (int j = 0; j < each; ++j) {
            const int row = y + i * edge, col = column + x + j * edge;
            if (row >= at.rows || col >= a.n) continue;
            const float bias = a.bias ? to_float(a.bias[int64_t{at.expert} * a.n + col]) : 0.0f;
            a.out[(first + row) * a.n + col] = from_float<T>(sums[i][j] + bias);
        }
}

/// dw_e [N, K] (+)= dy_eᵀ·x_e
template <class T>
struct SumArgs {
    float* dw;
    const T *dy, *x;
    const int32_t *offsets, *row_token;  // row_token may be null
    int N, K;
    bool accumulate;
};

template <class T>
__global__ void __launch_bounds__(threads) sums_kernel(SumArgs<T> a) {
    __shared__ SharedTiles shared;
    const int expert = static_cast<int>(blockIdx.z), n = static_cast<int>(blockIdx.y) * tile,
              k = static_cast<int>(blockIdx.x) * tile;
    const int64_t first = a.offsets[expert];
    const int rows = a.offsets[expert + 1] - static_cast<int>(first);
    if (rows == 0 && a.accumulate) return;
    float sums[each][each] = {};
    const Operand<T, true> dy{a.dy + first * a.N + n, a.N, a.N - n},
        x{(a.row_token ? a.x : a.x + first * a.K) + k, a.K, a.K - k,
          a.row_token ? a.row_token + first : nullptr};
    multiply(sums, shared, rows, dy, x);
    const int tx = static_cast<int>(threadIdx.x) % edge, ty = static_cast<int>(threadIdx.x) / edge;
#pragma unroll
    for (int i = 0; i < each; ++i)
#pragma unroll
        for (int j = 0; j < each; ++j) {
            const int row = n + ty + i * edge, col = k + tx + j * edge;
            if (row >= a.N || col >= a.K) continue;
            float& out = a.dw[(int64_t{expert} * a.N + row) * a.K + col];
            out = a.accumulate ? out + sums[i][j] : sums[i][j];
        }
}

// Column sums: tiles of an expert's rows are summed into partials, then the partials of the expert,
// always in the same order.

constexpr int bias_rows = 128, bias_warps = 8;

/// partials [tiles, N]. A block takes a tile and 32 columns.
template <class T>
__global__ void __launch_bounds__(bias_warps* warp_size)
    sum_tiles_kernel(float* partials, const T* dy, const int32_t* offsets, int E, int N) {
    __shared__ float shared[bias_warps][warp_size];
    __shared__ int first_tiles[most_experts + 1];
    const experts::RowTiles tiles(first_tiles, offsets, E, bias_rows);
    if (blockIdx.y >= static_cast<unsigned>(tiles.count())) return;
    const experts::RowTile at = tiles.find(blockIdx.y, 1, 1);
    const int lane = static_cast<int>(threadIdx.x % warp_size),
              warp = static_cast<int>(threadIdx.x) / warp_size;
    const int64_t column = int64_t{blockIdx.x} * warp_size + lane;
    float sum = 0;
    if (column < N) {
#pragma unroll 4
        for (int r = warp; r < min(at.rows, bias_rows); r += bias_warps)
            sum += to_float(dy[int64_t{at.first_row + r} * N + column]);
    }
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= N) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < bias_warps; ++w) total += shared[w][lane];
    partials[int64_t{blockIdx.y} * N + column] = total;
}

/// dbias_e (+)= the sums of its tiles. A block takes an expert and 256 columns.
__global__ void __launch_bounds__(threads)
    sum_partials_kernel(float* dbias, const float* partials, const int32_t* offsets, int E, int N,
                        bool accumulate) {
    __shared__ int first_tiles[most_experts + 1];
    const experts::RowTiles tiles(first_tiles, offsets, E, bias_rows);
    const int expert = static_cast<int>(blockIdx.y);
    const int64_t column = int64_t{blockIdx.x} * threads + threadIdx.x;
    if (column >= N) return;
    float total = 0;
#pragma unroll 4
    for (int i = first_tiles[expert]; i < first_tiles[expert + 1]; ++i)
        total += partials[int64_t{i} * N + column];
    float& out = dbias[int64_t{expert} * N + column];
    out = accumulate ? out + total : total;
}

size_t column_sum_bytes(int64_t R, int64_t E, int64_t N) {
    return static_cast<size_t>(experts::most_row_tiles(R, E, bias_rows) * N) * sizeof(float);
}

void column_sums(Stream& stream, const GroupedLinearBackwardWeight& args) {
    const int64_t R = args.dy.rows(), N = args.dy.cols(), E = args.offsets.numel() - 1;
    auto* const partials = stream.scratch_for<float>(column_sum_bytes(R, E, N));
    const auto* const offsets = static_cast<const int32_t*>(args.offsets.data);
    with_element_type(args.dy.dtype, [&](auto type) {
        using T = decltype(type);
        const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(N, warp_size)),
                        static_cast<unsigned>(experts::most_row_tiles(R, E, bias_rows)));
        sum_tiles_kernel<T><<<grid, bias_warps * warp_size, 0, stream_of(stream)>>>(
            partials, static_cast<const T*>(args.dy.data), offsets, static_cast<int>(E),
            static_cast<int>(N));
        CUDA_CHECK_LAUNCH();
    });
    const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(N, threads)), static_cast<unsigned>(E));
    sum_partials_kernel<<<grid, threads, 0, stream_of(stream)>>>(
        static_cast<float*>(args.dbias.data), partials, offsets, static_cast<int>(E),
        static_cast<int>(N), args.dbias.accumulate);
    CUDA_CHECK_LAUNCH();
}

template <bool weight_along>
void launch_rows(Stream& stream, const GroupedLinearForward& args) {
    const int64_t R = args.out.rows(), n = args.out.cols(), k = args.x.cols(),
                  E = args.offsets.numel() - 1;
    with_element_type(args.out.dtype, [&](auto type) {
        using T = decltype(type);
        const dim3 grid(static_cast<unsigned>(experts::most_row_tiles(R, E, tile)),
                        static_cast<unsigned>(ceil_div<int64_t>(n, tile)));
        rows_kernel<T, weight_along><<<grid, threads, 0, stream_of(stream)>>>(
            {static_cast<T*>(args.out.data), static_cast<const T*>(args.x.data),
             static_cast<const T*>(args.w.values.data), static_cast<const T*>(args.bias.data),
             static_cast<const int32_t*>(args.offsets.data),
             static_cast<const int32_t*>(args.row_token.data), static_cast<int>(E),
             static_cast<int>(n), static_cast<int>(k)});
        CUDA_CHECK_LAUNCH();
    });
}

struct Extents {
    int64_t E, R, N, K;
};

/// What the choice of a product's way depends on (grouped_ways.h).
struct TiledProduct {
    const char* name;
    Extents extents;
    int64_t columns;  // of the result
    bool repeatable;  // it overwrites its outputs
};

/// A product on tensor cores. by_mma() submits it; by_wgmma(columns of a tile) does or returns
/// false.
template <class ByMma, class ByWgmma>
void run_tiled(Stream& stream, const TiledProduct& product, const ByMma& by_mma,
               const ByWgmma& by_wgmma) {
    const Extents& x = product.extents;
    stream.queue->kept<GroupedWays>().run(
        stream, concat(product.name, " E=", x.E, ",R=", x.R, ",N=", x.N, ",K=", x.K),
        product.repeatable, product.columns, [&](GroupedWay way) {
            if (way != GroupedWay::mma) return by_wgmma(way == GroupedWay::wgmma_256 ? 256 : 128);
            by_mma();
            return true;
        });
}

}  // namespace

void grouped_linear_forward(Stream& stream, const GroupedLinearForward& args) {
    const Extents extents{args.offsets.numel() - 1, args.out.rows(), args.out.cols(),
                          args.x.cols()};
    if (tile_supports(args))
        return run_tiled(
            stream, {args.row_token ? "gathering" : "forward", extents, extents.N, true},
            [&] { tile_forward(stream, args); },
            [&](int block_n) { return wgmma_forward(stream, args, block_n); });
    launch_rows<false>(stream, args);
}

void grouped_linear_backward_input(Stream& stream, const GroupedLinearBackwardInput& args) {
    const Extents extents{args.offsets.numel() - 1, args.dx.rows(), args.dy.cols(), args.dx.cols()};
    if (tile_supports(args))
        return run_tiled(
            stream, {"backward_input", extents, extents.K, true},
            [&] { tile_backward_input(stream, args); },
            [&](int block_n) { return wgmma_backward_input(stream, args, block_n); });
    launch_rows<true>(stream, as_forward(args));
}

void grouped_linear_backward_weight(Stream& stream, const GroupedLinearBackwardWeight& args) {
    if (args.dbias) column_sums(stream, args);
    const int64_t N = args.dy.cols(), K = args.x.cols(), E = args.offsets.numel() - 1;
    if (tile_supports(args))
        return run_tiled(
            stream,
            {args.row_token ? "gathering_weight" : "backward_weight",
             {E, args.dy.rows(), N, K},
             K,
             !args.dw.accumulate},
            [&] { tile_backward_weight(stream, args); },
            [&](int block_n) { return wgmma_backward_weight(stream, args, block_n); });
    with_element_type(args.dy.dtype, [&](auto type) {
        using T = decltype(type);
        const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(K, tile)),
                        static_cast<unsigned>(ceil_div<int64_t>(N, tile)),
                        static_cast<unsigned>(E));
        sums_kernel<T><<<grid, threads, 0, stream_of(stream)>>>(
            {static_cast<float*>(args.dw.data), static_cast<const T*>(args.dy.data),
             static_cast<const T*>(args.x.data), static_cast<const int32_t*>(args.offsets.data),
             static_cast<const int32_t*>(args.row_token.data), static_cast<int>(N),
             static_cast<int>(K), args.dw.accumulate});
        CUDA_CHECK_LAUNCH();
    });
}

size_t grouped_linear_scratch_bytes(const GroupedLinearShape& shape) {
    return column_sum_bytes(shape.R, shape.E, shape.N);
}

}  // namespace train_gpt::cuda
