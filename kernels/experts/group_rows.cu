// In three launches: each block counts the experts in its range of pairs; one block turns the
// counts into the first row of each expert and block; each block places its pairs. Within a block,
// warps have ranges one after the other, and within a warp lanes are numbered among those with the
// same expert, so that pairs of an expert keep their order.
//
// With a capacity, pairs are sorted twice. After the first time each pair sees whether its expert
// has so many pairs of its sequence before it; the second time those that do are left out.
#include <algorithm>
#include <cstdint>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/experts/group_rows.h"
#include "kernels/experts/route.h"

namespace train_gpt::cuda {

namespace {

constexpr int warps = 8, threads = warps * warp_size;
constexpr unsigned all_lanes = 0xffffffffu;
constexpr int64_t most_blocks = 128;  // the middle launch adds up as many counts in turn

/// Pairs of a warp: a multiple of the warp's size.
int64_t pairs_of_warp(int64_t pairs) {
    return ceil_div(ceil_div(pairs, most_blocks * warps), int64_t{warp_size}) * warp_size;
}
int64_t block_count(int64_t pairs) { return ceil_div(pairs, pairs_of_warp(pairs) * warps); }

/// Calls f(pair, expert, lanes with the same expert) for the warp's pairs in order. Pairs without
/// an expert have −1, as have lanes beyond the last pair.
template <class F>
__device__ __forceinline__ void for_pairs_of_warp(const int32_t* experts, int64_t pairs,
                                                  int64_t per_warp, F&& f) {
    const int64_t first =
        (int64_t{blockIdx.x} * warps + static_cast<int>(threadIdx.x) / warp_size) * per_warp;
    for (int64_t i = 0; i < per_warp; i += warp_size) {
        const int64_t pair = first + i + threadIdx.x % warp_size;
        const int expert = pair < pairs ? experts[pair] : -1;
        f(pair, expert, __match_any_sync(all_lanes, expert));
    }
}

/// Counts of each warp, [warps][E] in shared memory.
__device__ __forceinline__ void count_pairs(int* counts, const int32_t* experts, int64_t pairs,
                                            int64_t per_warp, int E) {
    for (int i = static_cast<int>(threadIdx.x); i < warps * E; i += threads) counts[i] = 0;
    __syncthreads();
    int* const own = counts + static_cast<int>(threadIdx.x) / warp_size * E;
    for_pairs_of_warp(experts, pairs, per_warp, [&](int64_t, int expert, unsigned same) {
        // The first of the lanes counts for all.
        if (expert >= 0 &&
            __ffs(static_cast<int>(same)) - 1 == static_cast<int>(threadIdx.x % warp_size))
            own[expert] += __popc(same);
        __syncwarp();
    });
    __syncthreads();
}

/// block_counts [blocks, E]
__global__ void __launch_bounds__(threads)
    count_kernel(int32_t* block_counts, const int32_t* experts, int64_t pairs, int64_t per_warp,
                 int E) {
    __shared__ int counts[warps * most_experts];
    count_pairs(counts, experts, pairs, per_warp, E);
    for (int e = static_cast<int>(threadIdx.x); e < E; e += threads) {
        int total = 0;
#pragma unroll
        for (int w = 0; w < warps; ++w) total += counts[w * E + e];
        block_counts[int64_t{blockIdx.x} * E + e] = total;
    }
}

/// Turns the counts into first rows; a thread takes an expert.
__global__ void __launch_bounds__(most_experts)
    first_rows_kernel(int32_t* block_counts, int32_t* offsets, int blocks, int E) {
    __shared__ int warp_totals[most_experts / warp_size];
    const int e = static_cast<int>(threadIdx.x), lane = e % warp_size, warp = e / warp_size;
    int total = 0;
    if (e < E) {
#pragma unroll 8
        for (int b = 0; b < blocks; ++b) total += block_counts[int64_t{b} * E + e];
    }
    int sum = total;  // of the experts of the warp up to this one
#pragma unroll
    for (int distance = 1; distance < warp_size; distance *= 2) {
        const int before = __shfl_up_sync(all_lanes, sum, distance);
        if (lane >= distance) sum += before;
    }
    if (lane == warp_size - 1) warp_totals[warp] = sum;
    __syncthreads();
    int first = sum - total;
    for (int w = 0; w < warp; ++w) first += warp_totals[w];
    if (e >= E) return;
    offsets[e] = first;
    if (e == E - 1) offsets[E] = first + total;
#pragma unroll 8
    for (int b = 0; b < blocks; ++b) {
        int32_t& of_block = block_counts[int64_t{b} * E + e];
        const int count = of_block;
        of_block = first;
        first += count;
    }
}

/// Pair i is one of k choices of token i / k: its expert is experts[i], or none if that is −1.
struct Pairs {
    const int32_t* experts;
    int64_t count, per_warp;
    int E, k;
};

/// There are few blocks. Without the 1, ptxas spares registers so that more fit, and spills.
__global__ void __launch_bounds__(threads, 1)
    place_kernel(int32_t* row_token, int32_t* row_of, const int32_t* first_rows, Pairs pairs) {
    __shared__ int rows[warps * most_experts];  // counts of the warps, then their next rows
    const int E = pairs.E;
    count_pairs(rows, pairs.experts, pairs.count, pairs.per_warp, E);
    for (int e = static_cast<int>(threadIdx.x); e < E; e += threads) {
        int next = first_rows[int64_t{blockIdx.x} * E + e];
#pragma unroll
        for (int w = 0; w < warps; ++w) {
            const int count = rows[w * E + e];
            rows[w * E + e] = next;
            next += count;
        }
    }
    __syncthreads();
    int* const own = rows + static_cast<int>(threadIdx.x) / warp_size * E;
    const unsigned lower = (1u << threadIdx.x % warp_size) - 1;
    const auto place = [&](int64_t pair, int expert, unsigned same) {
        const int row = expert < 0 ? 0 : own[expert] + __popc(same & lower);
        __syncwarp();
        if (expert >= 0) {
            row_of[pair] = row;
            row_token[row] = static_cast<int32_t>(pair / pairs.k);
            if ((same & lower) == 0) own[expert] += __popc(same);
        } else if (pair < pairs.count) {
            row_of[pair] = -1;
        }
        __syncwarp();
    };
    for_pairs_of_warp(pairs.experts, pairs.count, pairs.per_warp, place);
}

/// Replaces row_of, of all pairs, by the expert of a pair, or −1 for one that is dropped.
__global__ void __launch_bounds__(threads)
    drop_kernel(int32_t* row_of, const int32_t* offsets, const int32_t* row_token, Pairs pairs,
                int of_sequence, int64_t capacity) {
    const int64_t pair = int64_t{blockIdx.x} * threads + threadIdx.x;
    if (pair >= pairs.count) return;
    const int expert = pairs.experts[pair];
    const int64_t before = row_of[pair] - capacity;
    const int token = static_cast<int>(pair / pairs.k);
    const bool drops =
        before >= offsets[expert] && row_token[before] / of_sequence == token / of_sequence;
    row_of[pair] = drops ? -1 : expert;
}

/// of_pairs: the expert of each pair.
Pairs pairs_of(const GroupRows& args, const Tensor& of_pairs) {
    const int64_t pairs = args.experts.numel();
    return {static_cast<const int32_t*>(of_pairs.data), pairs, pairs_of_warp(pairs),
            static_cast<int>(args.offsets.numel() - 1), static_cast<int>(args.experts.cols())};
}

/// Pairs whose expert is −1 get no row. of_pairs [N, k] may be args.row_of.
void sort_pairs(Stream& stream, const GroupRows& args, const Tensor& of_pairs) {
    const Pairs pairs = pairs_of(args, of_pairs);
    const auto blocks = static_cast<unsigned>(block_count(pairs.count));
    auto* const first_rows =
        stream.scratch_for<int32_t>(group_rows_scratch_bytes(pairs.count, pairs.E));
    count_kernel<<<blocks, threads, 0, stream_of(stream)>>>(first_rows, pairs.experts, pairs.count,
                                                            pairs.per_warp, pairs.E);
    CUDA_CHECK_LAUNCH();
    first_rows_kernel<<<1, most_experts, 0, stream_of(stream)>>>(
        first_rows, static_cast<int32_t*>(args.offsets.data), static_cast<int>(blocks), pairs.E);
    CUDA_CHECK_LAUNCH();
    place_kernel<<<blocks, threads, 0, stream_of(stream)>>>(
        static_cast<int32_t*>(args.row_token.data), static_cast<int32_t*>(args.row_of.data),
        first_rows, pairs);
    CUDA_CHECK_LAUNCH();
}

}  // namespace

void group_rows(Stream& stream, const GroupRows& args) {
    sort_pairs(stream, args, args.experts);
    if (args.capacity == 0) return;
    const int64_t pairs = args.experts.numel();
    drop_kernel<<<static_cast<unsigned>(ceil_div<int64_t>(pairs, threads)), threads, 0,
                  stream_of(stream)>>>(args.row_of.as<int32_t>(), args.offsets.as<int32_t>(),
                                       args.row_token.as<int32_t>(), pairs_of(args, args.experts),
                                       static_cast<int>(args.experts.rows() / args.sequences),
                                       args.capacity);
    CUDA_CHECK_LAUNCH();
    sort_pairs(stream, args, args.row_of);
}

size_t group_rows_scratch_bytes(int64_t pairs, int64_t E) {
    return static_cast<size_t>(block_count(pairs) * E) * sizeof(int32_t);
}

}  // namespace train_gpt::cuda
