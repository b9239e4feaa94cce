// The forward pass of attention with Hopper's own instructions: tile_forward.cu says what is
// computed. Two schedules overlap softmax and products: while a warpgroup takes the exponentials of
// a tile, its product of the tile before with the values runs; and the warpgroups take turns in
// submitting products, so that one computes exponentials while the other's products run.
#include "kernels/attention/cuda.h"
#include "kernels/attention/sinks.cuh"
#include "kernels/attention/wgmma_tile.cuh"

namespace train_gpt::cuda {

#ifdef TRAIN_GPT_SM90A

namespace {

using namespace tiles;

struct ForwardMaps {
    CUtensorMap q, k, v;
};

template <int head>
struct ForwardMemory {
    static constexpr HopperTiling tiling = hopper_forward_tiling(head);
    static constexpr int held_bytes = panels_bytes<head>(block_rows),
                         tile_bytes = panels_bytes<head>(tiling.block_n);
    using HeldBarriers = TileBarriers<tiling.held>;
    using StageBarriers = TileBarriers<tiling.stages>;
    // Offsets from the first tile.
    static constexpr int keys = tiling.held * held_bytes,
                         values = keys + tiling.stages * tile_bytes,
                         held_barriers = values + tiling.stages * tile_bytes,
                         key_barriers = held_barriers + HeldBarriers::bytes,
                         value_barriers = key_barriers + StageBarriers::bytes,
                         bytes = value_barriers + StageBarriers::bytes + 1023;
    static_assert(bytes <= hopper_shared_bytes_limit);

    uint32_t begin;

    __device__ __forceinline__ uint32_t q(int i) const { return begin + i * held_bytes; }
    __device__ __forceinline__ uint32_t k(int i) const { return begin + keys + i * tile_bytes; }
    __device__ __forceinline__ uint32_t v(int i) const { return begin + values + i * tile_bytes; }
    __device__ __forceinline__ HeldBarriers of_q() const { return {begin + held_barriers}; }
    __device__ __forceinline__ StageBarriers of_k() const { return {begin + key_barriers}; }
    __device__ __forceinline__ StageBarriers of_v() const { return {begin + value_barriers}; }
};

/// Turns scores into exp2(scale·score − row_max) for the new row maxima and adds them to row_sum.
/// `correction`: what sums with the previous maxima are to be multiplied by.
template <int columns>
__device__ __forceinline__ void take_exponentials(float (&scores)[columns][4], float (&row_max)[2],
                                                  float (&row_sum)[2], float (&correction)[2],
                                                  float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = scores[0][2 * half];
#pragma unroll
        for (int n = 0; n < columns; ++n)
            largest = fmaxf(fmaxf(largest, scores[n][2 * half]), scores[n][2 * half + 1]);
        const float now = fmaxf(row_max[half], row_max_of_lanes(largest) * scale);
        correction[half] = power_of_2(row_max[half] - now);
        row_max[half] = now;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < columns; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& p = scores[n][2 * half + i];
                p = power_of_2(fmaf(p, scale, -now));
                sum += p;
            }
        }
        row_sum[half] = row_sum[half] * correction[half] + sum;
    }
}

/// The producer: one warp, whose first lane starts the copies of all the block's tiles.
template <int head>
__device__ __forceinline__ void load_tiles(const ForwardMaps& maps, const AttentionShape& shape,
                                           const TileScheduler& scheduler,
                                           const ForwardMemory<head>& memory) {
    using Memory = ForwardMemory<head>;
    constexpr int block_n = Memory::tiling.block_n;
    hopper::Ring<Memory::tiling.held> held;
    hopper::Ring<Memory::tiling.stages> ring;
    const unsigned count = static_cast<unsigned>(scheduler.heads * scheduler.tiles);
#pragma unroll 1
    for (unsigned index = blockIdx.x; index < count; index += gridDim.x) {
        const QueryBlock block(shape, block_rows, block_n, scheduler, index);
        if (lane_index() == 0) {
            hopper::wait(memory.of_q().empty(held.stage()), held.parity() ^ 1);
            hopper::arrive_expecting(memory.of_q().full(held.stage()), Memory::held_bytes);
            load_panels<head, block_rows>(memory.q(held.stage()), maps.q,
                                          memory.of_q().full(held.stage()), block.first_row,
                                          block.h, block.b);
#pragma unroll 1
            for (int tile = block.first_tile; tile <= block.last_tile; ++tile) {
                hopper::wait(memory.of_k().empty(ring.stage()), ring.parity() ^ 1);
                hopper::arrive_expecting(memory.of_k().full(ring.stage()), Memory::tile_bytes);
                load_panels<head, block_n>(memory.k(ring.stage()), maps.k,
                                           memory.of_k().full(ring.stage()), tile * block_n,
                                           block.h_kv, block.b);
                hopper::wait(memory.of_v().empty(ring.stage()), ring.parity() ^ 1);
                hopper::arrive_expecting(memory.of_v().full(ring.stage()), Memory::tile_bytes);
                load_panels<head, block_n>(memory.v(ring.stage()), maps.v,
                                           memory.of_v().full(ring.stage()), tile * block_n,
                                           block.h_kv, block.b);
                ring.advance();
            }
        }
        __syncwarp();
        held.advance();
    }
}

/// Named barriers by which the consumers take turns in submitting products.
__device__ __forceinline__ void take_turn(int consumer) {
    hopper::sync_named<consumers * threads>(1 + consumer);
}
__device__ __forceinline__ void pass_turn(int consumer) {
    hopper::arrive_named<consumers * threads>(1 + (consumer ^ 1));
}

/// A consumer: the warpgroup's 64 queries of each of the block's tiles.
template <int head, bool capped>
__device__ __forceinline__ void attend(const AttentionForward& args, float scale,
                                       const ScoreCap& cap, const TileScheduler& scheduler,
                                       const ForwardMemory<head>& memory, int consumer) {
    using Memory = ForwardMemory<head>;
    constexpr int block_n = Memory::tiling.block_n, columns = block_n / 8;
    const AttentionShape& shape = args.shape;
    const unsigned count = static_cast<unsigned>(scheduler.heads * scheduler.tiles);
    hopper::Ring<Memory::tiling.held> held;
    hopper::Ring<Memory::tiling.stages> keys, values;
    if (consumer == 1) pass_turn(consumer);  // the first consumer begins
#pragma unroll 1
    for (unsigned index = blockIdx.x; index < count; index += gridDim.x) {
        const QueryBlock block(shape, block_rows, block_n, scheduler, index);
        const int warp_row = block.first_row + consumer * 64 + warp_index() * 16;
        const uint32_t q = memory.q(held.stage());
        // Finite, because −∞ − (−∞) is NaN and a row may see none of the keys in the first tiles.
        float row_max[2] = {-1e38f, -1e38f}, row_sum[2] = {}, correction[2];
        float out[head / 8][4] = {}, scores[1][columns][4];
        uint32_t weights[columns / 2][4];
        const auto softmax = [&](int tile) {
            if constexpr (capped) {
#pragma unroll
                for (int n = 0; n < columns; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        scores[0][n][i] = cap.from_tanh * tanh_of(scores[0][n][i] * cap.to_tanh);
            }
            block.mask(scores, -std::numeric_limits<float>::infinity(), warp_row, tile * block_n,
                       shape.T);
            take_exponentials(scores[0], row_max, row_sum, correction, scale);
        };

        hopper::wait(memory.of_q().full(held.stage()), held.parity());
        hopper::wait(memory.of_k().full(keys.stage()), keys.parity());
        take_turn(consumer);
        hopper::begin_products();
        add_scores<head, block_n>(scores[0], q, consumer * 64, memory.k(keys.stage()));
        hopper::end_products();
        pass_turn(consumer);
        hopper::wait_for_products<0>();
        hopper::settle(scores[0]);
        give_back(memory.of_k().empty(keys.stage()));
        keys.advance();
        softmax(block.first_tile);
        to_weights(weights, scores[0]);

#pragma unroll 1
        for (int tile = block.first_tile + 1; tile <= block.last_tile; ++tile) {
            hopper::wait(memory.of_k().full(keys.stage()), keys.parity());
            hopper::wait(memory.of_v().full(values.stage()), values.parity());
            take_turn(consumer);
            hopper::begin_products();
            add_scores<head, block_n>(scores[0], q, consumer * 64, memory.k(keys.stage()));
            hopper::end_products();
            add_weighted<head, block_n>(out, weights, memory.v(values.stage()));
            hopper::end_products();
            pass_turn(consumer);
            hopper::wait_for_products<1>();
            hopper::settle(scores[0]);
            give_back(memory.of_k().empty(keys.stage()));
            keys.advance();
            softmax(tile);
            hopper::wait_for_products<0>();
            hopper::settle(out);
            hopper::settle(weights);
            give_back(memory.of_v().empty(values.stage()));
            values.advance();
#pragma unroll
            for (int n = 0; n < head / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[n][i] *= correction[i / 2];
            to_weights(weights, scores[0]);
        }
        give_back(memory.of_q().empty(held.stage()));
        held.advance();
        hopper::wait(memory.of_v().full(values.stage()), values.parity());
        hopper::begin_products();
        add_weighted<head, block_n>(out, weights, memory.v(values.stage()));
        hopper::end_products();
        hopper::wait_for_products<0>();
        hopper::settle(out);
        hopper::settle(weights);
        give_back(memory.of_v().empty(values.stage()));
        values.advance();

        const int lane = lane_index();
        const float sink = sink_of(args.sinks, block.h) * std::numbers::log2e_v<float>;
        float factor[1][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float largest = fmaxf(row_max[half], sink),
                        rescale = power_of_2(row_max[half] - largest),
                        sum = fmaf(row_sum_of_lanes(row_sum[half]), rescale,
                                   power_of_2(sink - largest));
            factor[0][half] = rescale / sum;
            const int row = warp_row + half * 8 + lane / 4;
            if (args.lse && lane % 4 == 0 && row < block.end_row)
                args.lse[int64_t{block.head} * shape.T + row] =
                    (largest + log2f(sum)) * std::numbers::ln2_v<float>;
        }
        float sums[1][head / 8][4];
#pragma unroll
        for (int n = 0; n < head / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][n][i] = out[n][i];
        store_rows<head>({head_of(args.out, block.b, block.h) + warp_row * args.out.token,
                          args.out.token, block.end_row - warp_row, shape.D},
                         lane, sums, factor);
    }
    if (consumer == 0) take_turn(consumer);  // the turn that the other has passed last
}

template <int head, bool capped>
__global__ void __launch_bounds__(hopper_threads, 1)
    forward_kernel(const __grid_constant__ ForwardMaps maps, const AttentionForward args,
                   const float scale, const ScoreCap cap, const TileScheduler scheduler) {
    extern __shared__ char memory[];
    const ForwardMemory<head> shared{tiles_begin(memory)};
    if (threadIdx.x == 0) {
        shared.of_q().init();
        shared.of_k().init();
        shared.of_v().init();
        hopper::publish_barriers();
    }
    __syncthreads();
    const int group = static_cast<int>(threadIdx.x) / threads;
    if (group == 0) {
        hopper::give_registers<producer_registers>();
        if (warp_index() == 0) load_tiles<head>(maps, args.shape, scheduler, shared);
    } else {
        hopper::take_registers<consumer_registers>();
        attend<head, capped>(args, scale, cap, scheduler, shared, group - 1);
    }
}

}  // namespace

bool attention_forward_wgmma(Stream& stream, const AttentionForward& args) {
    const AttentionShape& shape = args.shape;
    const int block_n = hopper_forward_tiling(shape.D).block_n;
    const auto q = tensor_map(args.q, shape.B, shape.T, shape.H, shape.D, block_rows),
               k = tensor_map(args.k, shape.B, shape.S, shape.H_kv, shape.D, block_n),
               v = tensor_map(args.v, shape.B, shape.S, shape.H_kv, shape.D, block_n);
    if (!q || !k || !v) return false;
    with_hopper_variant(shape, [&](auto padded, auto capped) {
        constexpr int head = padded;
        const int64_t bytes =
            int64_t{2} * shape.S * shape.D * sizeof(Element) / (shape.H / shape.H_kv);
        launch_hopper(
            stream, forward_kernel<head, capped>,
            tile_scheduler(stream, shape.B * shape.H, ceil_div(shape.T, block_rows), bytes),
            ForwardMemory<head>::bytes, ForwardMaps{*q, *k, *v}, args,
            shape.scale * std::numbers::log2e_v<float>, ScoreCap(shape));
    });
    return true;
}

#else

bool attention_forward_wgmma(Stream&, const AttentionForward&) { return false; }

#endif

}  // namespace train_gpt::cuda
