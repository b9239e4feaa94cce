// The forward pass of attention for all arguments that the contract allows.
#include <limits>

#include "kernels/attention/cuda.h"
#include "kernels/attention/general.cuh"
#include "kernels/attention/sinks.cuh"

namespace train_gpt::cuda {

namespace {

using namespace general;

template <class Tiling>
size_t forward_shared_bytes(int D) {
    return floats(Tiling::rows * padded(D) +
                  Tiling::warps * (warp_size * Tiling::rows + Tiling::rows * D + 2 * Tiling::rows));
}

/// What the warps of a block have added up, in shared memory.
struct WarpSums {
    float* values;        // [warps, rows, D]: weighted sums of values
    const float* maxima;  // [warps, rows]: of scores
    float* totals;        // [warps, rows]: of weights
};

/// Gives the sums of all warps the same row maxima, divides them by the rows' totals, which include
/// the head's sink, and writes lse of the first lse_rows rows, unless it is null. Overwrites
/// totals.
template <class Tiling>
__device__ __forceinline__ void scale_warp_sums(const WarpSums& of, int D, float sink, float* lse,
                                                int lse_rows) {
    constexpr int rows = Tiling::rows, warps = Tiling::warps;
    if (const int r = static_cast<int>(threadIdx.x); r < rows) {
        float largest = of.maxima[r], total = 0;
        for (int w = 1; w < warps; ++w) largest = fmaxf(largest, of.maxima[w * rows + r]);
        largest = fmaxf(largest, sink);
        for (int w = 0; w < warps; ++w)
            total += of.totals[w * rows + r] * expf(of.maxima[w * rows + r] - largest);
        total += expf(sink - largest);
        for (int w = 0; w < warps; ++w)
            of.totals[w * rows + r] = expf(of.maxima[w * rows + r] - largest) / total;
        if (lse && r < lse_rows) lse[r] = largest + logf(total);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < rows * D; i += static_cast<int>(blockDim.x))
        for (int w = 0; w < warps; ++w) of.values[w * rows * D + i] *= of.totals[w * rows + i / D];
    __syncthreads();
}

/// out and lse of Tiling::rows queries of one head. Shared memory: the queries and, for each warp,
/// 32 weights per query, its sums of values, and its row maxima and row sums.
template <class Element, class Tiling, bool packed>
__global__ void __launch_bounds__(Tiling::threads, Tiling::warps <= 4 ? 2 : 1)
    forward_kernel(const AttentionForward args) {
    constexpr int rows = Tiling::rows;
    const AttentionShape& shape = args.shape;
    const int D = shape.D, warp = static_cast<int>(threadIdx.x / warp_size),
              lane = static_cast<int>(threadIdx.x % warp_size);
    const Place place(shape.H, shape.T, rows, true);
    const ScoreCap cap(shape);
    const int b = place.b, h = place.h, h_kv = h / (shape.H / shape.H_kv),
              end_row = min(place.first_row + rows, shape.T);

    extern __shared__ float4 memory[];
    auto* const queries = reinterpret_cast<float*>(memory);
    auto* const all_weights = reinterpret_cast<Weights<rows>*>(queries + rows * padded(D));
    Weights<rows>* const weights = all_weights + warp * warp_size;
    auto* const warp_sums = reinterpret_cast<float*>(all_weights + Tiling::warps * warp_size);
    float *const warp_max = warp_sums + Tiling::warps * rows * D, *const warp_total =
                                                                      warp_max +
                                                                      Tiling::warps * rows;

    stage_rows<Element>(queries, {args.q, b, h, place.first_row, shape.T}, rows, D);
    __syncthreads();

    const int last_key = end_row - 1 + shape.S - shape.T;
    int first_key = last_key;
    for (int t = place.first_row; t < end_row; ++t)
        first_key = min(first_key, Range(shape, b, t).first);

    float sums[rows][lane_elements] = {}, row_max[rows], row_sum[rows] = {};
    // Finite, because −∞ − (−∞) is NaN and a row may see none of the first keys.
#pragma unroll
    for (int r = 0; r < rows; ++r) row_max[r] = std::numeric_limits<float>::lowest();
    for (int key0 = first_key + warp * warp_size; key0 <= last_key;
         key0 += Tiling::warps * warp_size) {
        const int key = key0 + lane;
        float scores[rows];
        multiply<rows, packed>(scores, queries,
                               row_of<Element>(args.k, b, h_kv, min(key, last_key)), D);
        Weights<rows> mine;
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const bool seen = Range(shape, b, min(place.first_row + r, end_row - 1)).contains(key);
            const float score =
                seen ? cap(scores[r] * shape.scale) : -std::numeric_limits<float>::infinity();
            const float now = fmaxf(row_max[r], cuda::warp_max(score)),
                        correction = expf(row_max[r] - now);
            mine.of[r] = expf(score - now);
            row_sum[r] = row_sum[r] * correction + mine.of[r];
            row_max[r] = now;
#pragma unroll
            for (int i = 0; i < lane_elements; ++i) sums[r][i] *= correction;
        }
        weights[lane] = mine;
        __syncwarp();
        add_rows(sums, weights, row_of<Element>(args.v, b, h_kv, key0), args.v.token,
                 min(warp_size, last_key + 1 - key0), D);
        __syncwarp();
    }
    put_sums(warp_sums + warp * rows * D, sums, D, lane);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
        const float sum = warp_sum(row_sum[r]);
        if (lane == 0) {
            warp_max[warp * rows + r] = row_max[r];
            warp_total[warp * rows + r] = sum;
        }
    }
    __syncthreads();

    const int64_t head = int64_t{b} * shape.H + h;
    scale_warp_sums<Tiling>({warp_sums, warp_max, warp_total}, D, sink_of(args.sinks, h),
                            args.lse ? args.lse + head * shape.T + place.first_row : nullptr,
                            end_row - place.first_row);
    merge_and_store<rows, Tiling::warps, Element>({args.out, b, h, place.first_row, end_row},
                                                  warp_sums, 1, D);
}

}  // namespace

void attention_forward_general(Stream& stream, const AttentionForward& args) {
    const AttentionShape& shape = args.shape;
    with_access(shape, {args.k}, [&](auto element, auto packed) {
        const auto run = [&](auto cut) {
            using Tiling = decltype(cut);
            launch<Tiling>(stream, forward_kernel<decltype(element), Tiling, packed>,
                           int64_t{shape.B} * shape.H, shape.T,
                           forward_shared_bytes<Tiling>(shape.D), args);
        };
        if (shape.T == 1)
            run(SingleQueryTiling{});
        else
            run(QueriesTiling{});
    });
}

}  // namespace train_gpt::cuda
