// The forward pass of attention on tensor cores. Dao, arXiv 2307.08691.
#include <numbers>

#include "kernels/attention/cuda.h"
#include "kernels/attention/tile.cuh"

namespace train_gpt::cuda {

namespace {

using namespace tiles;

/// The queries, and two stages of keys and values.
template <int head>
constexpr int forward_shared_bytes = SwizzledTile<head>::bytes(forward_tiling(head).block_m() +
                                                               2 * 2 *
                                                                   forward_tiling(head).block_n);

/// One block computes out and lse for a tile of queries of one head: it holds the queries and
/// streams the tiles of keys and values that they see, beginning with the first. Scores stay in
/// registers. Row maxima are of scores in units of log 2, so the exponential is one fused
/// multiply-add and one exp2; `scale` is the shape's scale in these units.
template <int head>
__global__ void __launch_bounds__(threads, forward_tiling(head).blocks_per_sm)
    forward_kernel(const AttentionForward args, const float scale, const TileScheduler scheduler) {
    constexpr Tiling tiling = forward_tiling(head);
    constexpr int row_tiles = tiling.warp_m / 16, columns = tiling.block_n / 8;
    constexpr uint32_t tile_bytes = SwizzledTile<head>::bytes(tiling.block_n);
    static_assert(forward_shared_bytes<head> <= shared_bytes_limit);

    extern __shared__ __align__(128) char memory[];
    const uint32_t queries = shared_address(memory),
                   stages = queries + SwizzledTile<head>::bytes(tiling.block_m());

    const AttentionShape& shape = args.shape;
    const auto assigned = scheduler(blockIdx.x);
    const int b = assigned.head / shape.H, h = assigned.head % shape.H,
              h_kv = h / (shape.H / shape.H_kv);
    const int first_row = (scheduler.tiles - 1 - assigned.rank) * tiling.block_m(),
              end_row = min(first_row + tiling.block_m(), shape.T);
    const int warp = warp_index(), lane = lane_index();
    const int warp_row = first_row + warp * tiling.warp_m;
    const int position = shape.S - shape.T;  // of query 0
    const int32_t* doc_start = shape.doc_start ? shape.doc_start + int64_t{b} * shape.T : nullptr;
    const int2 documents =
        doc_start ? range_of(doc_start + first_row, end_row - first_row) : int2{0, 0};
    const int first_tile = documents.x / tiling.block_n,
              last_tile = (end_row - 1 + position) / tiling.block_n;

    const Element *k = head_of(args.k, b, h_kv), *v = head_of(args.v, b, h_kv);
    const auto load = [&](int tile) {
        const uint32_t stage = stages + tile % 2 * 2 * tile_bytes;
        load_stage<head, tiling.block_n>(stage, k, args.k.token, v, args.v.token,
                                         tile * tiling.block_n, shape.S, shape.D);
    };
    load_tile<head, tiling.block_m()>(queries, head_of(args.q, b, h), args.q.token, first_row,
                                      end_row, shape.D);
    load(first_tile);
    wait_for_copies();
    __syncthreads();

    const OperandFragments<head, tiling.warp_m, tiling.in_registers> q_fragments(queries, warp,
                                                                                 lane);
    const uint32_t right = lane_offset_right<head>(lane), down = lane_offset_down<head>(lane);
    float out[row_tiles][head / 8][4] = {}, row_sum[row_tiles][2] = {}, row_max[row_tiles][2];
    // Finite, because −∞ − (−∞) is NaN and a row may see none of the keys in the first tiles.
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) row_max[m][0] = row_max[m][1] = -1e38f;

#pragma unroll 1
    for (int tile = first_tile; tile <= last_tile; ++tile) {
        wait_for_copies();
        __syncthreads();  // the tile has arrived for all warps, and no warp reads the previous one
        if (tile < last_tile) load(tile + 1);
        const uint32_t stage = stages + tile % 2 * 2 * tile_bytes;
        const int key = tile * tiling.block_n;
        if (key > warp_row + tiling.warp_m - 1 + position)
            continue;  // this warp sees no more keys; others may

        float scores[row_tiles][columns][4] = {};
        multiply<head>(scores, q_fragments, stage + right);
        if (key + tiling.block_n - 1 > warp_row + position || key < documents.y) {
#pragma unroll
            for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = warp_row + m * 16 + half * 8 + lane / 4;
                    const int first = doc_start ? doc_start[min(row, shape.T - 1)] : 0;
#pragma unroll
                    for (int n = 0; n < columns; ++n) {
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const int at = key + n * 8 + lane % 4 * 2 + i;
                            if (at < first || at > row + position)
                                scores[m][n][2 * half + i] =
                                    -std::numeric_limits<float>::infinity();
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float largest = scores[m][0][2 * half];
#pragma unroll
                for (int n = 0; n < columns; ++n)
                    largest =
                        fmaxf(fmaxf(largest, scores[m][n][2 * half]), scores[m][n][2 * half + 1]);
                const float before = row_max[m][half],
                            now = fmaxf(before, row_max_of_lanes(largest) * scale);
                const float correction = power_of_2(before - now);
                float sum = 0;
#pragma unroll
                for (int n = 0; n < columns; ++n) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& p = scores[m][n][2 * half + i];
                        p = power_of_2(fmaf(p, scale, -now));
                        sum += p;
                    }
                }
                row_max[m][half] = now;
                row_sum[m][half] = row_sum[m][half] * correction + sum;
#pragma unroll
                for (int n = 0; n < head / 8; ++n) {
                    out[m][n][2 * half] *= correction;
                    out[m][n][2 * half + 1] *= correction;
                }
            }
        }
#pragma unroll
        for (int row16 = 0; row16 < tiling.block_n / 16; ++row16) {
            uint32_t weights[row_tiles][4];
#pragma unroll
            for (int m = 0; m < row_tiles; ++m)
                to_weights(weights[m], scores[m][2 * row16], scores[m][2 * row16 + 1]);
            add_product<head>(out, weights,
                              stage + tile_bytes + down + row16 * SwizzledTile<head>::bytes(16));
        }
    }

    float factor[row_tiles][2];
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = row_sum_of_lanes(row_sum[m][half]);
            factor[m][half] = 1 / sum;
            const int row = warp_row + m * 16 + half * 8 + lane / 4;
            if (args.lse && lane % 4 == 0 && row < end_row)
                args.lse[int64_t{assigned.head} * shape.T + row] =
                    (row_max[m][half] + log2f(sum)) * std::numbers::ln2_v<float>;
        }
    }
    store_rows<head>(head_of(args.out, b, h) + warp_row * args.out.token, args.out.token,
                     end_row - warp_row, shape.D, lane, out, factor);
}

}  // namespace

void attention_forward_tiled(Stream& stream, const AttentionForward& args) {
    const AttentionShape& shape = args.shape;
    with_padded_head(shape.D, [&](auto padded) {
        constexpr int head = padded;
        const int tiles = ceil_div(shape.T, forward_tiling(head).block_m());
        const int64_t bytes =
            int64_t{2} * shape.S * shape.D * sizeof(Element) / (shape.H / shape.H_kv);
        launch(stream, forward_kernel<head>,
               tile_scheduler(stream, shape.B * shape.H, tiles, bytes), forward_shared_bytes<head>,
               args, shape.scale * std::numbers::log2e_v<float>);
    });
}

}  // namespace train_gpt::cuda
