// The backward pass of attention with Hopper's own instructions, in two kernels as in
// tile_backward.cu: one holds queries and sums dq, the other holds keys and sums dk and dv.
//
// Why not one kernel that adds to dq in order. It would have five products instead of seven: for a
// tile of 128 queries and 128 keys it saves two of 2·128·128·D FLOPs, for D = 64 0.6 µs of a
// multiprocessor at its peak (989 TFLOP/s). But it adds a tile of dq in fp32 each time, 128·D·4
// bytes: with D = 64 32 KiB, which take 0.8 µs of a multiprocessor's part of about 5.5 TB/s of L2,
// or twice that where a kernel reads, adds and writes. It must also clear dq before and convert it
// afterwards, which needs 4·B·T·H·D bytes of scratch memory, and the blocks of a head's keys wait
// for each other to add in order, causal tiles of different lengths most of all. All but the waits
// grow with D alike. So where sums are deterministic, two kernels cost less.
#include "kernels/attention/cuda.h"
#include "kernels/attention/wgmma_tile.cuh"

namespace train_gpt::cuda {

namespace {

/// Of a query. The kernel for dq leaves them for the other in the scratch memory, [B, H,
/// stats_rows(T)].
struct RowStats {
    float lse;  // −lse in units of log 2; −∞ for rows from T on: their probabilities are 0
    float dp;   // −Σ dout·out
};
constexpr int stats_rows(int T) { return ceil_div(T, 128) * 128; }

}  // namespace

#ifdef TRAIN_GPT_SM90A

namespace {

using namespace tiles;

/// Queries and dout, keys and values.
struct BackwardMaps {
    CUtensorMap q, dout, k, v;
};

__device__ __forceinline__ float probability(float score, float scale, const RowStats& stats) {
    return power_of_2(fmaf(score, scale, stats.lse));
}
/// Caps a score; what is the gradient of its probability is multiplied by the slope.
__device__ __forceinline__ void cap_score(float& score, float& dp, float stats_dp,
                                          const ScoreCap& cap) {
    const float t = tanh_of(score * cap.to_tanh);
    score = t * cap.from_tanh;
    dp = (dp + stats_dp) * (1.0f - t * t);
}

// -------------------------------------------------------------------------------------- dq

template <int head>
struct QueriesMemory {
    static constexpr HopperTiling tiling = hopper_queries_tiling(head);
    static constexpr int operand_bytes = panels_bytes<head>(block_rows),
                         held_bytes = 2 * operand_bytes,
                         tile_bytes = panels_bytes<head>(tiling.block_n),
                         stage_bytes = 2 * tile_bytes;
    using HeldBarriers = TileBarriers<tiling.held>;
    using StageBarriers = TileBarriers<tiling.stages>;
    static constexpr int stages = tiling.held * held_bytes,
                         held_barriers = stages + tiling.stages * stage_bytes,
                         stage_barriers = held_barriers + HeldBarriers::bytes,
                         bytes = stage_barriers + StageBarriers::bytes + 1023;
    static_assert(bytes <= hopper_shared_bytes_limit);

    uint32_t begin;

    __device__ __forceinline__ uint32_t q(int i) const { return begin + i * held_bytes; }
    __device__ __forceinline__ uint32_t dout(int i) const { return q(i) + operand_bytes; }
    __device__ __forceinline__ uint32_t k(int i) const { return begin + stages + i * stage_bytes; }
    __device__ __forceinline__ uint32_t v(int i) const { return k(i) + tile_bytes; }
    __device__ __forceinline__ HeldBarriers of_held() const { return {begin + held_barriers}; }
    __device__ __forceinline__ StageBarriers of_stages() const { return {begin + stage_barriers}; }
};

template <int head>
__device__ __forceinline__ void load_keys(const BackwardMaps& maps, const AttentionShape& shape,
                                          const TileScheduler& scheduler,
                                          const QueriesMemory<head>& memory) {
    using Memory = QueriesMemory<head>;
    constexpr int block_n = Memory::tiling.block_n;
    hopper::Ring<Memory::tiling.held> held;
    hopper::Ring<Memory::tiling.stages> ring;
    const unsigned count = static_cast<unsigned>(scheduler.heads * scheduler.tiles);
#pragma unroll 1
    for (unsigned index = blockIdx.x; index < count; index += gridDim.x) {
        const QueryBlock block(shape, block_rows, block_n, scheduler, index);
        if (lane_index() == 0) {
            const uint32_t held_full = memory.of_held().full(held.stage());
            hopper::wait(memory.of_held().empty(held.stage()), held.parity() ^ 1);
            hopper::arrive_expecting(held_full, Memory::held_bytes);
            load_panels<head, block_rows>(memory.q(held.stage()), maps.q, held_full,
                                          block.first_row, block.h, block.b);
            load_panels<head, block_rows>(memory.dout(held.stage()), maps.dout, held_full,
                                          block.first_row, block.h, block.b);
#pragma unroll 1
            for (int tile = block.first_tile; tile <= block.last_tile; ++tile) {
                const uint32_t full = memory.of_stages().full(ring.stage());
                hopper::wait(memory.of_stages().empty(ring.stage()), ring.parity() ^ 1);
                hopper::arrive_expecting(full, Memory::stage_bytes);
                load_panels<head, block_n>(memory.k(ring.stage()), maps.k, full, tile * block_n,
                                           block.h_kv, block.b);
                load_panels<head, block_n>(memory.v(ring.stage()), maps.v, full, tile * block_n,
                                           block.h_kv, block.b);
                ring.advance();
            }
        }
        __syncwarp();
        held.advance();
    }
}

/// The stats of a warp's 16 queries, which begin with row `local` of the tile of dout that has
/// arrived: two lanes compute each. Gives the lane those of its rows of the sums, and leaves all
/// for the other kernel.
template <int head>
__device__ __forceinline__ void compute_stats(RowStats (&stats)[2], RowStats* all_stats,
                                              const AttentionBackward& args,
                                              const QueryBlock& block, uint32_t douts, int local) {
    const AttentionShape& shape = args.shape;
    const int lane = lane_index(), i = local + lane / 2, row = block.first_row + i;
    RowStats mine{-std::numeric_limits<float>::infinity(), 0};
    if (row < block.end_row) {
        mine.lse = -args.lse[int64_t{block.head} * shape.T + row] * std::numbers::log2e_v<float>;
        const Element* out = head_of(args.out, block.b, block.h) + row * args.out.token;
        for (int chunk = lane % 2; chunk * 8 < shape.D; chunk += 2) {
            const auto o = Pack<Element>::load(out + chunk * 8);
            const auto g =
                load_shared<Pack<Element>>(douts + chunk / 8 * hopper::panel_bytes(block_rows) +
                                           hopper::chunk_offset(i, chunk % 8));
#pragma unroll
            for (int j = 0; j < 8; ++j) mine.dp -= to_float(o[j]) * to_float(g[j]);
        }
    }
    mine.dp += __shfl_xor_sync(all_lanes, mine.dp, 1);
    if (lane % 2 == 0) all_stats[int64_t{block.head} * stats_rows(shape.T) + row] = mine;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int from = 2 * (half * 8 + lane / 4);
        stats[half] = {__shfl_sync(all_lanes, mine.lse, from),
                       __shfl_sync(all_lanes, mine.dp, from)};
    }
}

template <int head, bool capped>
__device__ __forceinline__ void sum_dq(const AttentionBackward& args, float scale,
                                       const ScoreCap& cap, RowStats* all_stats,
                                       const TileScheduler& scheduler,
                                       const QueriesMemory<head>& memory) {
    using Memory = QueriesMemory<head>;
    const int consumer = static_cast<int>(threadIdx.x) / threads - 1;
    constexpr int block_n = Memory::tiling.block_n, columns = block_n / 8;
    const AttentionShape& shape = args.shape;
    const unsigned count = static_cast<unsigned>(scheduler.heads * scheduler.tiles);
    hopper::Ring<Memory::tiling.held> held;
    hopper::Ring<Memory::tiling.stages> ring;
    int previous = 0;  // the stage of the tile before
#pragma unroll 1
    for (unsigned index = blockIdx.x; index < count; index += gridDim.x) {
        const QueryBlock block(shape, block_rows, block_n, scheduler, index);
        const int local = consumer * 64 + warp_index() * 16, warp_row = block.first_row + local;
        const uint32_t q = memory.q(held.stage()), dout = memory.dout(held.stage());
        hopper::wait(memory.of_held().full(held.stage()), held.parity());
        RowStats stats[2];
        compute_stats<head>(stats, all_stats, args, block, dout, local);

        float dq[1][head / 8][4] = {}, p[1][columns][4], ds[columns][4];
        uint32_t weights[columns / 2][4];
#pragma unroll 1
        for (int tile = block.first_tile; tile <= block.last_tile; ++tile) {
            hopper::wait(memory.of_stages().full(ring.stage()), ring.parity());
            hopper::begin_products();
            add_scores<head, block_n>(p[0], q, consumer * 64, memory.k(ring.stage()));
            hopper::end_products();
            add_scores<head, block_n>(ds, dout, consumer * 64, memory.v(ring.stage()));
            hopper::end_products();
            // The scores; and the product for dq of the tile before.
            hopper::wait_for_products<1>();
            hopper::settle(p[0]);
            hopper::settle(dq[0]);
            if (tile > block.first_tile) {
                hopper::settle(weights);
                give_back(memory.of_stages().empty(previous));
            }
            if constexpr (capped) {
                hopper::wait_for_products<0>();
                hopper::settle(ds);
#pragma unroll
                for (int n = 0; n < columns; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        cap_score(p[0][n][i], ds[n][i], stats[i / 2].dp, cap);
            }
#pragma unroll
            for (int n = 0; n < columns; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    p[0][n][i] = probability(p[0][n][i], scale, stats[i / 2]);
            block.mask(p, 0, warp_row, tile * block_n, shape.T);
            if constexpr (!capped) {
                hopper::wait_for_products<0>();
                hopper::settle(ds);
            }
#pragma unroll
            for (int n = 0; n < columns; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    ds[n][i] = p[0][n][i] * (capped ? ds[n][i] : ds[n][i] + stats[i / 2].dp);
            to_weights(weights, ds);
            hopper::begin_products();
            add_weighted<head, block_n>(dq[0], weights, memory.k(ring.stage()));
            hopper::end_products();
            previous = ring.stage();
            ring.advance();
        }
        hopper::wait_for_products<0>();
        hopper::settle(dq[0]);
        hopper::settle(weights);
        give_back(memory.of_stages().empty(previous));
        give_back(memory.of_held().empty(held.stage()));
        held.advance();
        store_rows<head>({head_of(args.dq, block.b, block.h) + warp_row * args.dq.token,
                          args.dq.token, block.end_row - warp_row, shape.D},
                         lane_index(), dq, shape.scale);
    }
}

template <int head, bool capped>
__global__ void __launch_bounds__(hopper_threads, 1)
    backward_queries_kernel(const __grid_constant__ BackwardMaps maps, const AttentionBackward args,
                            const float scale, const ScoreCap cap, RowStats* all_stats,
                            const TileScheduler scheduler) {
    using Memory = QueriesMemory<head>;
    extern __shared__ char memory[];
    const Memory shared{tiles_begin(memory)};
    if (threadIdx.x == 0) {
        shared.of_held().init();
        shared.of_stages().init();
        hopper::publish_barriers();
    }
    __syncthreads();
    const int group = static_cast<int>(threadIdx.x) / threads;
    if (group == 0) {
        hopper::give_registers<producer_registers>();
        if (warp_index() == 0) load_keys<head>(maps, args.shape, scheduler, shared);
    } else {
        hopper::take_registers<consumer_registers>();
        sum_dq<head, capped>(args, scale, cap, all_stats, scheduler, shared);
    }
}

// -------------------------------------------------------------------------------------- dk, dv

template <int head>
struct KeysMemory {
    static constexpr HopperTiling tiling = hopper_keys_tiling(head);
    static constexpr int operand_bytes = panels_bytes<head>(block_rows),
                         held_bytes = 2 * operand_bytes,
                         tile_bytes = panels_bytes<head>(tiling.block_n),
                         stats_bytes = tiling.block_n * int{sizeof(RowStats)},
                         loaded_bytes = 2 * tile_bytes + stats_bytes;
    using HeldBarriers = TileBarriers<tiling.held>;
    using StageBarriers = TileBarriers<tiling.stages>;
    static constexpr int stages = tiling.held * held_bytes,
                         all_stats = stages + tiling.stages * 2 * tile_bytes,
                         held_barriers = all_stats + tiling.stages * stats_bytes,
                         stage_barriers = held_barriers + HeldBarriers::bytes,
                         queries = stage_barriers + StageBarriers::bytes,
                         bytes = queries + tiling.stages * int{sizeof(int)} + 1023;
    static_assert(bytes <= hopper_shared_bytes_limit);

    uint32_t begin;

    __device__ __forceinline__ uint32_t k(int i) const { return begin + i * held_bytes; }
    __device__ __forceinline__ uint32_t v(int i) const { return k(i) + operand_bytes; }
    __device__ __forceinline__ uint32_t q(int i) const {
        return begin + stages + i * 2 * tile_bytes;
    }
    __device__ __forceinline__ uint32_t dout(int i) const { return q(i) + tile_bytes; }
    __device__ __forceinline__ uint32_t stats(int i) const {
        return begin + all_stats + i * stats_bytes;
    }
    __device__ __forceinline__ HeldBarriers of_held() const { return {begin + held_barriers}; }
    __device__ __forceinline__ StageBarriers of_stages() const { return {begin + stage_barriers}; }

    // What the producer says of a streamed tile: twice its first query, plus last_tile_flag.
    __device__ __forceinline__ void write_query(int i, int said) const {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(query_address(i)), "r"(said) : "memory");
    }
    __device__ __forceinline__ int read_query(int i) const {
        int said;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(said) : "r"(query_address(i)) : "memory");
        return said;
    }

  private:
    __device__ __forceinline__ uint32_t query_address(int i) const {
        return begin + queries + i * int{sizeof(int)};
    }
};

/// A tile of keys of one key head, and the tiles of queries that the producer streams: head after
/// head of those that share the key head; each head from the tile of the first query that sees the
/// first key to the tile of the last query whose window has the last key.
struct HopperKeyBlock {
    int b, h_kv, group;
    int first_row, end_row;    // its keys
    int position;              // of query 0 among the keys
    int first_window;          // the first key in the window of query 0, or a negative number
    int T;                     // queries
    const int32_t* doc_start;  // of the queries of sequence b; may be null
    int first_query, end_query;

    __device__ __forceinline__ HopperKeyBlock(const AttentionShape& shape, int block_n,
                                              const TileScheduler& scheduler, unsigned index) {
        const auto assigned = scheduler(index);
        group = shape.H / shape.H_kv;
        b = assigned.head / shape.H_kv;
        h_kv = assigned.head % shape.H_kv;
        first_row = assigned.rank * block_rows;
        end_row = min(first_row + block_rows, shape.S);
        T = shape.T;
        position = shape.S - T;
        first_window = position + 1 - shape.window;
        doc_start = shape.doc_start ? shape.doc_start + int64_t{b} * T : nullptr;
        first_query = max(first_row - position, 0) / block_n * block_n;
        end_query = min(end_row - first_window, T);
    }
    __device__ __forceinline__ bool is_seen() const { return first_query < end_query; }
    /// Whether a tile of queries sees one of the keys. Asked by a whole warp.
    __device__ __forceinline__ bool sees(int query, int block_n) const {
        return !doc_start ||
               range_of(doc_start + query, min(block_n, T - query)).x < first_row + block_rows;
    }

    /// Clears the probabilities of keys that a query does not see. The warp's rows are keys, from
    /// `row` on; the columns are queries, from `query` on.
    template <int columns>
    __device__ __forceinline__ void mask(float (&p)[columns][4], int row, int query) const {
        if (!doc_start && query + position >= row + 15 &&
            query + columns * 8 - 1 + first_window <= row)
            return;
        const int lane = lane_index();
#pragma unroll
        for (int n = 0; n < columns; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int at = query + n * 8 + lane % 4 * 2 + j;
                const int first = max(doc_start ? doc_start[min(at, T - 1)] : 0, at + first_window);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int key = row + half * 8 + lane / 4;
                    if (key < first || key > at + position) p[n][2 * half + j] = 0;
                }
            }
        }
    }
};

/// Whether a streamed tile is the block's last. The producer knows the next tile that sees a key;
/// the consumers need not look.
constexpr int last_tile_flag = 1;

template <int head>
__device__ __forceinline__ void load_queries(const BackwardMaps& maps, const AttentionShape& shape,
                                             const RowStats* all_stats,
                                             const TileScheduler& scheduler,
                                             const KeysMemory<head>& memory) {
    using Memory = KeysMemory<head>;
    constexpr int block_n = Memory::tiling.block_n;
    hopper::Ring<Memory::tiling.held> held;
    hopper::Ring<Memory::tiling.stages> ring;
    const unsigned count = static_cast<unsigned>(scheduler.heads * scheduler.tiles);
#pragma unroll 1
    for (unsigned index = blockIdx.x; index < count; index += gridDim.x) {
        const HopperKeyBlock block(shape, block_n, scheduler, index);
        if (!block.is_seen()) continue;
        if (lane_index() == 0) {
            const uint32_t full = memory.of_held().full(held.stage());
            hopper::wait(memory.of_held().empty(held.stage()), held.parity() ^ 1);
            hopper::arrive_expecting(full, Memory::held_bytes);
            load_panels<head, block_rows>(memory.k(held.stage()), maps.k, full, block.first_row,
                                          block.h_kv, block.b);
            load_panels<head, block_rows>(memory.v(held.stage()), maps.v, full, block.first_row,
                                          block.h_kv, block.b);
        }
        __syncwarp();
        held.advance();
        int h = block.h_kv * block.group, query = block.first_query;
        const int end_head = h + block.group;
#pragma unroll 1
        while (h < end_head) {
            int next_h = h, next_query = query;
            do {
                next_query += block_n;
                if (next_query >= block.end_query) {
                    next_query = block.first_query;
                    ++next_h;
                }
            } while (next_h < end_head && !block.sees(next_query, block_n));
            if (lane_index() == 0) {
                const uint32_t full = memory.of_stages().full(ring.stage());
                hopper::wait(memory.of_stages().empty(ring.stage()), ring.parity() ^ 1);
                memory.write_query(ring.stage(),
                                   query * 2 + (next_h < end_head ? 0 : last_tile_flag));
                hopper::arrive_expecting(full, Memory::loaded_bytes);
                load_panels<head, block_n>(memory.q(ring.stage()), maps.q, full, query, h, block.b);
                load_panels<head, block_n>(memory.dout(ring.stage()), maps.dout, full, query, h,
                                           block.b);
                hopper::load_bytes(
                    memory.stats(ring.stage()),
                    all_stats + (int64_t{block.b} * shape.H + h) * stats_rows(shape.T) + query,
                    Memory::stats_bytes, full);
            }
            __syncwarp();
            ring.advance();
            h = next_h;
            query = next_query;
        }
    }
}

struct alignas(16) TwoRowStats {
    RowStats of[2];
};
/// Of columns 8·n + 2·(lane % 4) and the next one.
__device__ __forceinline__ TwoRowStats load_stats(uint32_t stats, int n) {
    return load_shared<TwoRowStats>(stats + (n * 8 + lane_index() % 4 * 2) * int{sizeof(RowStats)});
}

template <int head, bool capped>
__device__ __forceinline__ void sum_keys(const AttentionBackward& args, float scale,
                                         const ScoreCap& cap, const TileScheduler& scheduler,
                                         const KeysMemory<head>& memory, int consumer) {
    using Memory = KeysMemory<head>;
    constexpr int block_n = Memory::tiling.block_n, columns = block_n / 8;
    // Products for dk and dv run beside the next tile's scores where there are registers for it.
    // There, too, probabilities are computed while dout·vᵀ is on its way.
    constexpr bool beside = head <= 96, dp_later = beside && !capped;
    const AttentionShape& shape = args.shape;
    const unsigned count = static_cast<unsigned>(scheduler.heads * scheduler.tiles);
    hopper::Ring<Memory::tiling.held> held;
    hopper::Ring<Memory::tiling.stages> ring;
#pragma unroll 1
    for (unsigned index = blockIdx.x; index < count; index += gridDim.x) {
        const HopperKeyBlock block(shape, block_n, scheduler, index);
        const int warp_row = block.first_row + consumer * 64 + warp_index() * 16;
        float dk[1][head / 8][4] = {}, dv[1][head / 8][4] = {};
        if (block.is_seen()) {
            const uint32_t k = memory.k(held.stage()), v = memory.v(held.stage());
            hopper::wait(memory.of_held().full(held.stage()), held.parity());
            int previous = -1, query;  // the stage of the tile before
            uint32_t p_weights[columns / 2][4], ds_weights[columns / 2][4];
            do {
                hopper::wait(memory.of_stages().full(ring.stage()), ring.parity());
                query = memory.read_query(ring.stage());
                float p[columns][4], ds[columns][4];
                hopper::begin_products();
                add_scores<head, block_n>(p, k, consumer * 64, memory.q(ring.stage()));
                hopper::end_products();
                add_scores<head, block_n>(ds, v, consumer * 64, memory.dout(ring.stage()));
                hopper::end_products();
                // The scores; and the products for dk and dv of the tile before.
                hopper::wait_for_products<1>();
                hopper::settle(p);
                hopper::settle(dk[0]);
                hopper::settle(dv[0]);
                if (beside && previous >= 0) {
                    hopper::settle(p_weights);
                    hopper::settle(ds_weights);
                    give_back(memory.of_stages().empty(previous));
                }
                if constexpr (!dp_later) {
                    hopper::wait_for_products<0>();
                    hopper::settle(ds);
                }
#pragma unroll
                for (int n = 0; n < columns; ++n) {
                    const TwoRowStats stats = load_stats(memory.stats(ring.stage()), n);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if constexpr (capped)
                            cap_score(p[n][i], ds[n][i], stats.of[i % 2].dp, cap);
                        else if constexpr (!dp_later)
                            ds[n][i] += stats.of[i % 2].dp;
                        p[n][i] = probability(p[n][i], scale, stats.of[i % 2]);
                    }
                }
                block.mask(p, warp_row, query / 2);
                to_weights(p_weights, p);
                hopper::begin_products();
                add_weighted<head, block_n>(dv[0], p_weights, memory.dout(ring.stage()));
                hopper::end_products();
                if constexpr (dp_later) {
                    hopper::wait_for_products<1>();
                    hopper::settle(ds);
#pragma unroll
                    for (int n = 0; n < columns; ++n) {
                        const TwoRowStats stats = load_stats(memory.stats(ring.stage()), n);
#pragma unroll
                        for (int i = 0; i < 4; ++i) ds[n][i] += stats.of[i % 2].dp;
                    }
                }
#pragma unroll
                for (int n = 0; n < columns; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) ds[n][i] *= p[n][i];
                to_weights(ds_weights, ds);
                hopper::begin_products();
                add_weighted<head, block_n>(dk[0], ds_weights, memory.q(ring.stage()));
                hopper::end_products();
                if (!beside) {
                    hopper::wait_for_products<0>();
                    hopper::settle(dk[0]);
                    hopper::settle(dv[0]);
                    hopper::settle(p_weights);
                    hopper::settle(ds_weights);
                    give_back(memory.of_stages().empty(ring.stage()));
                }
                previous = ring.stage();
                ring.advance();
            } while ((query & last_tile_flag) == 0);
            if (beside) {
                hopper::wait_for_products<0>();
                hopper::settle(dk[0]);
                hopper::settle(dv[0]);
                hopper::settle(p_weights);
                hopper::settle(ds_weights);
                give_back(memory.of_stages().empty(previous));
            }
            give_back(memory.of_held().empty(held.stage()));
            held.advance();
        }
        // warp_row once more: it would be held throughout the loop.
        const int row = block.first_row + consumer * 64 + thread_index() / warp_size * 16;
        store_key_gradients<head>(args, {block.b, block.h_kv, row, block.end_row}, lane_index(), dk,
                                  dv);
    }
}

template <int head, bool capped>
__global__ void __launch_bounds__(hopper_threads, 1)
    backward_keys_kernel(const __grid_constant__ BackwardMaps maps, const AttentionBackward args,
                         const float scale, const ScoreCap cap, const RowStats* all_stats,
                         const TileScheduler scheduler) {
    using Memory = KeysMemory<head>;
    extern __shared__ char memory[];
    const Memory shared{tiles_begin(memory)};
    if (threadIdx.x == 0) {
        shared.of_held().init();
        shared.of_stages().init();
        hopper::publish_barriers();
    }
    __syncthreads();
    const int group = static_cast<int>(threadIdx.x) / threads;
    if (group == 0) {
        hopper::give_registers<producer_registers>();
        if (warp_index() == 0) load_queries<head>(maps, args.shape, all_stats, scheduler, shared);
    } else {
        hopper::take_registers<consumer_registers>();
        sum_keys<head, capped>(args, scale, cap, scheduler, shared, group - 1);
    }
}

/// The maps of both kernels differ in the rows of a box.
std::optional<BackwardMaps> backward_maps(const AttentionBackward& args, int query_rows,
                                          int key_rows) {
    const AttentionShape& s = args.shape;
    const auto q = tensor_map(args.q, s.B, s.T, s.H, s.D, query_rows),
               dout = tensor_map(args.dout, s.B, s.T, s.H, s.D, query_rows),
               k = tensor_map(args.k, s.B, s.S, s.H_kv, s.D, key_rows),
               v = tensor_map(args.v, s.B, s.S, s.H_kv, s.D, key_rows);
    if (!q || !dout || !k || !v) return std::nullopt;
    return BackwardMaps{*q, *dout, *k, *v};
}

}  // namespace

std::optional<RowDeltas> attention_backward_wgmma(Stream& stream, const AttentionBackward& args) {
    const AttentionShape& shape = args.shape;
    const auto of_queries = backward_maps(args, block_rows, hopper_queries_tiling(shape.D).block_n);
    const auto of_keys = backward_maps(args, hopper_keys_tiling(shape.D).block_n, block_rows);
    if (!of_queries || !of_keys) return std::nullopt;
    auto* const stats = stream.scratch_for<RowStats>(attention_backward_wgmma_scratch_bytes(shape));
    const float scale = shape.scale * std::numbers::log2e_v<float>;
    with_hopper_variant(shape, [&](auto padded, auto capped) {
        constexpr int head = padded;
        const int64_t row_bytes = int64_t{2} * shape.D * sizeof(Element);
        const int group = shape.H / shape.H_kv;
        launch_hopper(stream, backward_queries_kernel<head, capped>,
                      tile_scheduler(stream, shape.B * shape.H, ceil_div(shape.T, block_rows),
                                     row_bytes * shape.S / group),
                      QueriesMemory<head>::bytes, *of_queries, args, scale, ScoreCap(shape), stats);
        launch_hopper(stream, backward_keys_kernel<head, capped>,
                      tile_scheduler(stream, shape.B * shape.H_kv, ceil_div(shape.S, block_rows),
                                     row_bytes * shape.T * group),
                      KeysMemory<head>::bytes, *of_keys, args, scale, ScoreCap(shape), stats);
    });
    return RowDeltas{&stats->dp, sizeof(RowStats) / sizeof(float), stats_rows(shape.T), -1};
}

#else

std::optional<RowDeltas> attention_backward_wgmma(Stream&, const AttentionBackward&) {
    return std::nullopt;
}

#endif

size_t attention_backward_wgmma_scratch_bytes(const AttentionShape& shape) {
    return sizeof(RowStats) * static_cast<size_t>(shape.B) * static_cast<size_t>(shape.H) *
           static_cast<size_t>(stats_rows(shape.T));
}

}  // namespace train_gpt::cuda
