// The backward pass of attention on tensor cores, in two kernels: one holds queries and sums dq,
// the other holds keys and sums dk and dv. Both recompute the scores. In return, every sum has one
// owner and a fixed order, and probabilities never leave the registers. Dao, arXiv 2307.08691.
#include "kernels/attention/cuda.h"
#include "kernels/attention/tile.cuh"

namespace train_gpt::cuda {

namespace {

using namespace tiles;

/// The initial values of a query's accumulators, chosen so that p = exp(scale·scores) and ds =
/// p·dp. The first kernel leaves them for the second in the scratch memory, [B, H, stats_rows(T)].
struct RowStats {
    float scores;  // −lse / scale; −∞ for rows from T on, which makes their probabilities zero
    float dp;      // −Σ dout·out
};
constexpr int stats_rows(int T) { return ceil_div(T, 128) * 128; }

/// Queries and dout, two stages of keys and values, RowStats of the queries.
template <int head>
constexpr int queries_shared_bytes =
    SwizzledTile<head>::bytes(2 * backward_queries_tiling(head).block_m() +
                              2 * 2 * backward_queries_tiling(head).block_n) +
    int{sizeof(RowStats)} * backward_queries_tiling(head).block_m();

/// Keys and values, two stages of queries, dout and RowStats.
template <int head>
constexpr int keys_shared_bytes =
    SwizzledTile<head>::bytes(2 * backward_keys_tiling(head).block_m() +
                              2 * 2 * backward_keys_tiling(head).block_n) +
    int{sizeof(RowStats)} * 2 * backward_keys_tiling(head).block_n;

template <int row_tiles>
__device__ __forceinline__ void to_probabilities(float (&scores)[row_tiles][2][4], float scale) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[m][n][i] = power_of_2(scores[m][n][i] * scale);
}
template <int row_tiles>
__device__ __forceinline__ void multiply_elements(float (&ds)[row_tiles][2][4],
                                                  const float (&p)[row_tiles][2][4]) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) ds[m][n][i] *= p[m][n][i];
}

/// Caps a score and adds what its accumulator began with otherwise; dp is multiplied by the slope.
__device__ __forceinline__ void cap_score(float& score, float& dp, float stats,
                                          const ScoreCap& cap) {
    const float t = tanh_of(score * cap.to_tanh);
    score = fmaf(t, cap.from_tanh, stats);
    dp *= 1.0f - t * t;
}

/// RowStats of the block's queries, for its warps and for the other kernel. `douts`: the tile of
/// dout in shared memory, which has arrived.
template <int head>
__device__ __forceinline__ void compute_row_stats(RowStats* stats, RowStats* all_stats,
                                                  const AttentionBackward& args,
                                                  const QueryBlock& block, uint32_t douts) {
    const AttentionShape& shape = args.shape;
    const int i = thread_index(), row = block.first_row + i;
    if (i >= backward_queries_tiling(head).block_m()) return;
    RowStats mine{-std::numeric_limits<float>::infinity(), 0};
    if (row < block.end_row) {
        mine.scores = -args.lse[int64_t{block.head} * shape.T + row] / shape.scale;
        const Element* out = head_of(args.out, block.b, block.h) + row * args.out.token;
        for (int chunk = 0; chunk * 8 < shape.D; ++chunk) {
            const auto o = Pack<Element>::load(out + chunk * 8);
            const auto g = load_shared<Pack<Element>>(douts + SwizzledTile<head>::offset(i, chunk));
#pragma unroll
            for (int j = 0; j < 8; ++j) mine.dp -= to_float(o[j]) * to_float(g[j]);
        }
    }
    stats[i] = mine;
    all_stats[int64_t{block.head} * stats_rows(shape.T) + row] = mine;
}

/// The accumulators of 16 keys begin with their rows' stats. Scores that are capped get them
/// afterwards.
template <bool capped, int row_tiles>
__device__ __forceinline__ void start_from_rows(float (&scores)[row_tiles][2][4],
                                                float (&dp)[row_tiles][2][4],
                                                const RowStats (&stats)[row_tiles][2]) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[m][n][i] = capped ? 0.0f : stats[m][i / 2].scores;
                dp[m][n][i] = stats[m][i / 2].dp;
            }
        }
    }
}
template <int row_tiles>
__device__ __forceinline__ void cap_rows(float (&scores)[row_tiles][2][4],
                                         float (&dp)[row_tiles][2][4],
                                         const RowStats (&stats)[row_tiles][2],
                                         const ScoreCap& cap) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                cap_score(scores[m][n][i], dp[m][n][i], stats[m][i / 2].scores, cap);
}

/// One block computes dq and RowStats for a tile of queries of one head; it streams the tiles of
/// keys and values that they see. `scale` is the shape's scale in units of log 2.
template <int head, bool capped>
__global__ void __launch_bounds__(threads, backward_queries_tiling(head).blocks_per_sm)
    backward_queries_kernel(const AttentionBackward args, const float scale, const ScoreCap cap,
                            RowStats* all_stats, const TileScheduler scheduler) {
    constexpr Tiling tiling = backward_queries_tiling(head);
    constexpr int row_tiles = tiling.warp_m / 16;
    constexpr uint32_t operand_bytes = SwizzledTile<head>::bytes(tiling.block_m()),
                       tile_bytes = SwizzledTile<head>::bytes(tiling.block_n);
    static_assert(queries_shared_bytes<head> <= shared_bytes_limit);
    static_assert(128 % tiling.block_m() == 0 && tiling.block_m() <= threads);

    extern __shared__ __align__(128) char memory[];
    auto* const stats = reinterpret_cast<RowStats*>(memory);
    const uint32_t queries = shared_address(stats + tiling.block_m()),
                   douts = queries + operand_bytes, stages = douts + operand_bytes;

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
    load_tile<head, tiling.block_m()>(douts, head_of(args.dout, block.b, block.h), args.dout.token,
                                      block.first_row, block.end_row, shape.D);
    load(block.first_tile);
    wait_for_copies();
    __syncthreads();
    compute_row_stats<head>(stats, all_stats, args, block, douts);
    __syncthreads();

    const OperandFragments<head, tiling.warp_m, tiling.in_registers> q_fragments(queries, warp,
                                                                                 lane);
    const OperandFragments<head, tiling.warp_m, tiling.in_registers - row_tiles> dout_fragments(
        douts, warp, lane);
    const uint32_t right = lane_offset_right<head>(lane), down = lane_offset_down<head>(lane);
    RowStats row_stats[row_tiles][2];
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            row_stats[m][half] = stats[warp * tiling.warp_m + m * 16 + half * 8 + lane / 4];
    float dq[row_tiles][head / 8][4] = {};

#pragma unroll 1
    for (int tile = block.first_tile; tile <= block.last_tile; ++tile) {
        wait_for_copies();
        __syncthreads();  // the tile has arrived for all warps, and no warp reads the previous one
        if (tile < block.last_tile) load(tile + 1);
#pragma unroll 1
        for (int row16 = 0; row16 < tiling.block_n / 16; ++row16) {
            const int key = tile * tiling.block_n + row16 * 16;
            const uint32_t key_rows =
                stages + tile % 2 * 2 * tile_bytes + row16 * SwizzledTile<head>::bytes(16);
            if (key > warp_row + tiling.warp_m - 1 + block.position)
                break;                                                // this warp sees no more keys
            if (key + 16 <= warp_row + block.first_window) continue;  // their windows begin later
            float p[row_tiles][2][4], ds[row_tiles][2][4];
            start_from_rows<capped>(p, ds, row_stats);
            multiply<head>(p, q_fragments, key_rows + right);
            multiply<head>(ds, dout_fragments, key_rows + tile_bytes + right);
            if constexpr (capped) cap_rows(p, ds, row_stats, cap);
            to_probabilities(p, scale);
            block.mask(p, 0, warp_row, key, shape.T);
            multiply_elements(ds, p);
            uint32_t weights[row_tiles][4];
            to_weights(weights, ds);
            add_product<head>(dq, weights, key_rows + down);
        }
    }
    store_rows<head>({head_of(args.dq, block.b, block.h) + warp_row * args.dq.token, args.dq.token,
                      block.end_row - warp_row, shape.D},
                     lane, dq, shape.scale);
}

/// What a block for a tile of keys of one key head works on, and the next tile of queries that it
/// streams: head after head of those that share the key head; each head begins with the tile of the
/// first query that sees the first key, and ends with the tile of the last query whose window has
/// the last key.
template <Tiling tiling>
struct KeyBlock {
    int b, h_kv;
    int first_row, end_row;    // its keys
    int position;              // of query 0 among the keys
    int first_window;          // the first key in the window of query 0, or a negative number
    int T;                     // queries
    const int32_t* doc_start;  // of the queries of sequence b; may be null
    int first_query, end_query, end_head;
    int next_head, next_query;

    __device__ __forceinline__ KeyBlock(const AttentionShape& shape,
                                        const TileScheduler& scheduler) {
        const auto assigned = scheduler(blockIdx.x);
        const int group = shape.H / shape.H_kv;
        b = assigned.head / shape.H_kv;
        h_kv = assigned.head % shape.H_kv;
        first_row = assigned.rank * tiling.block_m();
        end_row = min(first_row + tiling.block_m(), shape.S);
        T = shape.T;
        position = shape.S - T;
        first_window = position + 1 - shape.window;
        doc_start = shape.doc_start ? shape.doc_start + int64_t{b} * T : nullptr;
        end_head = (h_kv + 1) * group;
        next_head = end_head - group;
        next_query = first_query = max(first_row - position, 0) / tiling.block_n * tiling.block_n;
        end_query = min(end_row - first_window, T);
        if (first_query >= end_query) next_head = end_head;  // no query sees the keys
    }
    __device__ __forceinline__ bool has_next() const { return next_head < end_head; }

    /// Skips tiles that see none of the keys.
    __device__ __forceinline__ void advance() {
        do {
            next_query += tiling.block_n;
            if (next_query >= end_query) {
                next_query = first_query;
                ++next_head;
            }
        } while (doc_start && has_next() &&
                 range_of(doc_start + next_query, min(tiling.block_n, T - next_query)).x >=
                     first_row + tiling.block_m());
    }

    /// Clears the probabilities of keys that a query does not see. The warp's rows are keys, from
    /// `row` on; the columns are 16 queries, from `query` on.
    template <int row_tiles>
    __device__ __forceinline__ void mask(float (&p)[row_tiles][2][4], int row, int query,
                                         int lane) const {
        const int mine = query + lane % 16;
        const int first_key =  // that query `mine` sees
            max(doc_start ? doc_start[min(mine, T - 1)] : 0, mine + first_window);
        if (query + position >= row + tiling.warp_m - 1 && !__any_sync(all_lanes, first_key > row))
            return;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = query + n * 8 + lane % 4 * 2 + i % 2;
                const int first = __shfl_sync(all_lanes, first_key, at - query);
#pragma unroll
                for (int m = 0; m < row_tiles; ++m) {
                    const int key = row + m * 16 + i / 2 * 8 + lane / 4;
                    if (key < first || key > at + position) p[m][n][i] = 0;
                }
            }
        }
    }
};

struct alignas(16) TwoRowStats {
    RowStats of[2];
};
/// Of columns 8·n + 2·(lane % 4) and the next one.
__device__ __forceinline__ TwoRowStats load_stats(uint32_t stats, int n, int lane) {
    return load_shared<TwoRowStats>(stats + (n * 8 + lane % 4 * 2) * int{sizeof(RowStats)});
}

/// The accumulators of 16 queries begin with their columns' stats, which are in shared memory.
/// Scores that are capped get them afterwards.
template <bool capped, int row_tiles>
__device__ __forceinline__ void start_from_columns(float (&scores)[row_tiles][2][4],
                                                   float (&dp)[row_tiles][2][4], uint32_t stats,
                                                   int lane) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const TwoRowStats columns = load_stats(stats, n, lane);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[m][n][i] = capped ? 0.0f : columns.of[i % 2].scores;
                dp[m][n][i] = columns.of[i % 2].dp;
            }
        }
    }
}
template <int row_tiles>
__device__ __forceinline__ void cap_columns(float (&scores)[row_tiles][2][4],
                                            float (&dp)[row_tiles][2][4], uint32_t stats, int lane,
                                            const ScoreCap& cap) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const TwoRowStats columns = load_stats(stats, n, lane);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                cap_score(scores[m][n][i], dp[m][n][i], columns.of[i % 2].scores, cap);
    }
}

/// One block computes dk and dv for a tile of keys of one key head; for each query head that shares
/// it, the block streams the tiles of queries and dout that see the keys. Scores are transposed: a
/// warp's rows are keys.
template <int head, bool capped>
__global__ void __launch_bounds__(threads, backward_keys_tiling(head).blocks_per_sm)
    backward_keys_kernel(const AttentionBackward args, const float scale, const ScoreCap cap,
                         const RowStats* all_stats, const TileScheduler scheduler) {
    constexpr Tiling tiling = backward_keys_tiling(head, capped);
    constexpr int row_tiles = tiling.warp_m / 16;
    constexpr uint32_t operand_bytes = SwizzledTile<head>::bytes(tiling.block_m()),
                       tile_bytes = SwizzledTile<head>::bytes(tiling.block_n);
    constexpr int stats_chunks = tiling.block_n * int{sizeof(RowStats)} / 16;
    constexpr uint32_t stage_bytes = 2 * tile_bytes + stats_chunks * 16;
    static_assert(keys_shared_bytes<head> <= shared_bytes_limit);
    static_assert(stats_chunks <= threads && tiling.block_m() % tiling.block_n == 0);
    // The other kernel has written the stats of all rows of a streamed tile.
    static_assert(backward_queries_tiling(head).block_m() % tiling.block_n == 0);

    extern __shared__ __align__(128) char memory[];
    const uint32_t keys = shared_address(memory), values = keys + operand_bytes,
                   stages = values + operand_bytes;

    const AttentionShape& shape = args.shape;
    KeyBlock<tiling> block(shape, scheduler);
    const int warp = warp_index(), lane = lane_index();
    const int warp_row = block.first_row + warp * tiling.warp_m;
    const auto load_next = [&](uint32_t to) {
        const int h = block.next_head, query = block.next_query;
        load_stage<head, tiling.block_n>(to, {head_of(args.q, block.b, h), args.q.token},
                                         {head_of(args.dout, block.b, h), args.dout.token}, query,
                                         shape.T, shape.D);
        if (const int i = thread_index(); i < stats_chunks)
            copy_async(
                to + 2 * tile_bytes + i * 16,
                all_stats + (int64_t{block.b} * shape.H + h) * stats_rows(shape.T) + query + i * 2,
                true);
    };
    load_tile<head, tiling.block_m()>(keys, head_of(args.k, block.b, block.h_kv), args.k.token,
                                      block.first_row, block.end_row, shape.D);
    load_tile<head, tiling.block_m()>(values, head_of(args.v, block.b, block.h_kv), args.v.token,
                                      block.first_row, block.end_row, shape.D);
    if (block.has_next()) load_next(stages);
    wait_for_copies();
    __syncthreads();

    const OperandFragments<head, tiling.warp_m, tiling.in_registers> k_fragments(keys, warp, lane);
    const OperandFragments<head, tiling.warp_m, tiling.in_registers - row_tiles> v_fragments(
        values, warp, lane);
    const uint32_t right = lane_offset_right<head>(lane), down = lane_offset_down<head>(lane);
    float dk[row_tiles][head / 8][4] = {}, dv[row_tiles][head / 8][4] = {};

#pragma unroll 1
    for (uint32_t stage = stages; block.has_next(); stage = 2 * stages + stage_bytes - stage) {
        const int tile_query = block.next_query;
        block.advance();
        wait_for_copies();
        __syncthreads();  // the tile has arrived for all warps, and no warp reads the previous one
        if (block.has_next()) load_next(2 * stages + stage_bytes - stage);
#pragma unroll 1
        for (int query = tile_query; query < tile_query + tiling.block_n; query += 16) {
            const int row = query % tiling.block_n;
            const uint32_t stats = stage + 2 * tile_bytes + row * int{sizeof(RowStats)},
                           query_rows = stage + SwizzledTile<head>::bytes(row);
            if (query + 15 + block.position < warp_row ||
                query + block.first_window > warp_row + tiling.warp_m - 1)
                continue;  // none of the 16 queries sees the warp's keys
            float p[row_tiles][2][4], ds[row_tiles][2][4];
            start_from_columns<capped>(p, ds, stats, lane);
            multiply<head>(p, k_fragments, query_rows + right);
            multiply<head>(ds, v_fragments, query_rows + tile_bytes + right);
            if constexpr (capped) cap_columns(p, ds, stats, lane, cap);
            to_probabilities(p, scale);
            block.mask(p, warp_row, query, lane);
            multiply_elements(ds, p);
            uint32_t weights[row_tiles][4];
            to_weights(weights, p);
            add_product<head>(dv, weights, query_rows + tile_bytes + down);
            to_weights(weights, ds);
            add_product<head>(dk, weights, query_rows + down);
        }
    }
    store_key_gradients<head>(args, {block.b, block.h_kv, warp_row, block.end_row}, lane, dk, dv);
}

}  // namespace

size_t attention_backward_tiled_scratch_bytes(const AttentionShape& shape) {
    return sizeof(RowStats) * static_cast<size_t>(shape.B) * static_cast<size_t>(shape.H) *
           static_cast<size_t>(stats_rows(shape.T));
}

RowDeltas attention_backward_tiled(Stream& stream, const AttentionBackward& args) {
    const AttentionShape& shape = args.shape;
    auto* const stats = stream.scratch_for<RowStats>(attention_backward_tiled_scratch_bytes(shape));
    const float scale = shape.scale * std::numbers::log2e_v<float>;
    with_variant(shape, [&](auto padded, auto capped) {
        constexpr int head = padded;
        const int64_t row_bytes = int64_t{2} * shape.D * sizeof(Element);
        const int group = shape.H / shape.H_kv;
        launch(stream, backward_queries_kernel<head, capped>,
               tile_scheduler(stream, shape.B * shape.H,
                              ceil_div(shape.T, backward_queries_tiling(head).block_m()),
                              row_bytes * shape.S / group),
               queries_shared_bytes<head>, args, scale, ScoreCap(shape), stats);
        launch(stream, backward_keys_kernel<head, capped>,
               tile_scheduler(stream, shape.B * shape.H_kv,
                              ceil_div(shape.S, backward_keys_tiling(head).block_m()),
                              row_bytes * shape.T * group),
               keys_shared_bytes<head>, args, scale, ScoreCap(shape), stats);
    });
    return {&stats->dp, sizeof(RowStats) / sizeof(float), stats_rows(shape.T), -1};
}

}  // namespace train_gpt::cuda
