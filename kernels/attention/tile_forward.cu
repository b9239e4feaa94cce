// The forward pass of attention on tensor cores. Dao, arXiv 2307.08691.
#include "kernels/attention/cuda.h"
#include "kernels/attention/sinks.cuh"
#include "kernels/attention/tile.cuh"

namespace train_gpt::cuda {

namespace {

using namespace tiles;

/// The queries, and two stages of keys and values.
template <int head>
constexpr int forward_shared_bytes = SwizzledTile<head>::bytes(forward_tiling(head).block_m() +
                                                               2 * 2 *
                                                                   forward_tiling(head).block_n);

template <int row_tiles, int columns>
__device__ __forceinline__ void cap_scores(float (&scores)[row_tiles][columns][4],
                                           const ScoreCap& cap) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int n = 0; n < columns; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                scores[m][n][i] = cap.from_tanh * tanh_of(scores[m][n][i] * cap.to_tanh);
}

/// Turns scores into exp2(scale·score − row_max) for the new row maxima, adds them to row_sum, and
/// corrects what was summed with the previous maxima. Row maxima are of scores in units of log 2,
/// so the exponential is one fused multiply-add and one exp2.
template <int head, int row_tiles, int columns>
__device__ __forceinline__ void take_exponentials(float (&scores)[row_tiles][columns][4],
                                                  float (&row_max)[row_tiles][2],
                                                  float (&row_sum)[row_tiles][2],
                                                  float (&out)[row_tiles][head / 8][4],
                                                  float scale) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = scores[m][0][2 * half];
#pragma unroll
            for (int n = 0; n < columns; ++n)
                largest = fmaxf(fmaxf(largest, scores[m][n][2 * half]), scores[m][n][2 * half + 1]);
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
}

/// One block computes out and lse for a tile of queries of one head: it holds the queries and
/// streams the tiles of keys and values that they see, beginning with the first. Scores stay in
/// registers. `scale` is the shape's scale in units of log 2.
template <int head, bool capped>
__global__ void __launch_bounds__(threads, forward_tiling(head).blocks_per_sm)
    forward_kernel(const AttentionForward args, const float scale, const ScoreCap cap,
                   const TileScheduler scheduler) {
    constexpr Tiling tiling = forward_tiling(head);
    constexpr int row_tiles = tiling.warp_m / 16, columns = tiling.block_n / 8;
    constexpr uint32_t tile_bytes = SwizzledTile<head>::bytes(tiling.block_n);
    static_assert(forward_shared_bytes<head> <= shared_bytes_limit);

    extern __shared__ __align__(128) char memory[];
    const uint32_t queries = shared_address(memory),
                   stages = queries + SwizzledTile<head>::bytes(tiling.block_m());

    const AttentionShape& shape = args.shape;
    const QueryBlock block(shape, tiling, scheduler);
    const int warp = warp_index(), lane = lane_index();
    const int warp_row = block.first_row + warp * tiling.warp_m;

    const Element *k = head_of(args.k, block.b, block.h_kv),
                  *v = head_of(args.v, block.b, block.h_kv);
    const auto load = [&](int tile) {
        const uint32_t stage = stages + tile % 2 * 2 * tile_bytes;
        load_stage<head, tiling.block_n>(stage, {k, args.k.token}, {v, args.v.token},
                                         tile * tiling.block_n, shape.S, shape.D);
    };
    load_tile<head, tiling.block_m()>(queries, head_of(args.q, block.b, block.h), args.q.token,
                                      block.first_row, block.end_row, shape.D);
    load(block.first_tile);
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
    for (int tile = block.first_tile; tile <= block.last_tile; ++tile) {
        wait_for_copies();
        __syncthreads();  // the tile has arrived for all warps, and no warp reads the previous one
        if (tile < block.last_tile) load(tile + 1);
        const uint32_t stage = stages + tile % 2 * 2 * tile_bytes;
        const int key = tile * tiling.block_n;
        if (key > warp_row + tiling.warp_m - 1 + block.position ||
            key + tiling.block_n <= warp_row + block.first_window)
            continue;  // this warp sees none of the keys; others may

        float scores[row_tiles][columns][4] = {};
        multiply<head>(scores, q_fragments, stage + right);
        if constexpr (capped) cap_scores(scores, cap);
        block.mask(scores, -std::numeric_limits<float>::infinity(), warp_row, key, shape.T);
        take_exponentials<head>(scores, row_max, row_sum, out, scale);
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

    const int end_lane = thread_index() % warp_size;  // not kept throughout the loop
    const float sink = sink_of(args.sinks, block.h) * std::numbers::log2e_v<float>;
    float factor[row_tiles][2];
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float largest = fmaxf(row_max[m][half], sink),
                        correction = power_of_2(row_max[m][half] - largest),
                        sum = fmaf(row_sum_of_lanes(row_sum[m][half]), correction,
                                   power_of_2(sink - largest));
            factor[m][half] = correction / sum;
            const int row = warp_row + m * 16 + half * 8 + end_lane / 4;
            if (args.lse && end_lane % 4 == 0 && row < block.end_row)
                args.lse[int64_t{block.head} * shape.T + row] =
                    (largest + log2f(sum)) * std::numbers::ln2_v<float>;
        }
    }
    store_rows<head>({head_of(args.out, block.b, block.h) + warp_row * args.out.token,
                      args.out.token, block.end_row - warp_row, shape.D},
                     end_lane, out, factor);
}

}  // namespace

void attention_forward_tiled(Stream& stream, const AttentionForward& args) {
    const AttentionShape& shape = args.shape;
    with_variant(shape, [&](auto padded, auto capped) {
        constexpr int head = padded;
        const int tiles = ceil_div(shape.T, forward_tiling(head).block_m());
        const int64_t bytes =
            int64_t{2} * shape.S * shape.D * sizeof(Element) / (shape.H / shape.H_kv);
        launch(stream, forward_kernel<head, capped>,
               tile_scheduler(stream, shape.B * shape.H, tiles, bytes), forward_shared_bytes<head>,
               args, shape.scale * std::numbers::log2e_v<float>, ScoreCap(shape));
    });
}

}  // namespace train_gpt::cuda
