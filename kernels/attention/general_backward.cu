// The backward pass of attention for all arguments that the contract allows: one kernel computes
// dq, the other dk and dv.
#include "kernels/attention/cuda.h"
#include "kernels/attention/general.cuh"

namespace train_gpt::cuda {

namespace {

using namespace general;

size_t queries_shared_bytes(int D) {
    using Tiling = QueriesTiling;
    return floats(2 * Tiling::rows * padded(D) +
                  Tiling::warps * (warp_size * Tiling::rows + Tiling::rows * D) + 2 * Tiling::rows);
}

/// dq of QueriesTiling::rows queries of one head, and their delta = Σ dout·out for the other
/// kernel. Shared memory: queries and dout; for each warp, 32 weights per query and its sums; lse
/// and delta.
template <class Element, bool packed>
__global__ void __launch_bounds__(QueriesTiling::threads, 2)
    backward_queries_kernel(const AttentionBackward args, float* deltas) {
    using Tiling = QueriesTiling;
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
    float* const douts = queries + rows * padded(D);
    auto* const all_weights = reinterpret_cast<Weights<rows>*>(douts + rows * padded(D));
    Weights<rows>* const weights = all_weights + warp * warp_size;
    auto* const warp_sums = reinterpret_cast<float*>(all_weights + Tiling::warps * warp_size);
    float *const lse = warp_sums + Tiling::warps * rows * D, *const delta = lse + rows;

    stage_rows<Element>(queries, {args.q, b, h, place.first_row, shape.T}, rows, D);
    stage_rows<Element>(douts, {args.dout, b, h, place.first_row, shape.T}, rows, D);
    __syncthreads();
    for (int r = warp; r < rows; r += Tiling::warps) {
        const int t = min(place.first_row + r, end_row - 1);
        float sum = 0;
        for (int d = lane; d < D; d += warp_size)
            sum += douts[r * padded(D) + d] * to_float(row_of<Element>(args.out, b, h, t)[d]);
        sum = warp_sum(sum);
        if (lane == 0) {
            const int64_t at = (int64_t{b} * shape.H + h) * shape.T + t;
            lse[r] = args.lse[at];
            delta[r] = sum;
            if (place.first_row + r < end_row) deltas[at] = sum;
        }
    }
    __syncthreads();

    const int last_key = Range(shape, b, end_row - 1).last;
    int first_key = last_key;
    for (int t = place.first_row; t < end_row; ++t)
        first_key = min(first_key, Range(shape, b, t).first);

    float sums[rows][lane_elements] = {};
    for (int key0 = first_key + warp * warp_size; key0 <= last_key;
         key0 += Tiling::warps * warp_size) {
        const int key = key0 + lane;
        float scores[rows], dp[rows];
        multiply<rows, packed>(scores, queries,
                               row_of<Element>(args.k, b, h_kv, min(key, last_key)), D);
        multiply<rows, packed>(dp, douts, row_of<Element>(args.v, b, h_kv, min(key, last_key)), D);
        Weights<rows> mine;
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const bool seen = Range(shape, b, min(place.first_row + r, end_row - 1)).contains(key);
            const float score = cap(scores[r] * shape.scale);
            mine.of[r] = seen ? expf(score - lse[r]) * (dp[r] - delta[r]) * cap.slope(score) : 0;
        }
        weights[lane] = mine;
        __syncwarp();
        add_rows(sums, weights, row_of<Element>(args.k, b, h_kv, key0), args.k.token,
                 min(warp_size, last_key + 1 - key0), D);
        __syncwarp();
    }
    put_sums(warp_sums + warp * rows * D, sums, D, lane);
    __syncthreads();
    merge_and_store<rows, Tiling::warps, Element>({args.dq, b, h, place.first_row, end_row},
                                                  warp_sums, shape.scale, D);
}

size_t keys_shared_bytes(int D) {
    using Tiling = KeysTiling;
    return floats(2 * Tiling::rows * padded(D) +
                  2 * Tiling::warps * (warp_size * Tiling::rows + Tiling::rows * D));
}

/// dk and dv of KeysTiling::rows keys of one key head. Shared memory: keys and values; for each
/// warp, 32 weights per key and its sums, both for dk and for dv.
template <class Element, bool packed>
__global__ void __launch_bounds__(KeysTiling::threads, 2)
    backward_keys_kernel(const AttentionBackward args, const float* deltas) {
    using Tiling = KeysTiling;
    constexpr int rows = Tiling::rows;
    const AttentionShape& shape = args.shape;
    const int D = shape.D, T = shape.T, warp = static_cast<int>(threadIdx.x / warp_size),
              lane = static_cast<int>(threadIdx.x % warp_size);
    const Place place(shape.H_kv, shape.S, rows, false);
    const ScoreCap cap(shape);
    const int b = place.b, h_kv = place.h, group = shape.H / shape.H_kv,
              end_row = min(place.first_row + rows, shape.S);

    extern __shared__ float4 memory[];
    auto* const keys = reinterpret_cast<float*>(memory);
    float* const values = keys + rows * padded(D);
    auto* const all_weights = reinterpret_cast<Weights<rows>*>(values + rows * padded(D));
    Weights<rows>*const k_weights = all_weights + warp * warp_size, *const v_weights =
                                                                        k_weights +
                                                                        Tiling::warps * warp_size;
    auto *const dk_sums = reinterpret_cast<float*>(all_weights + 2 * Tiling::warps * warp_size),
                *const dv_sums = dk_sums + Tiling::warps * rows * D;

    stage_rows<Element>(keys, {args.k, b, h_kv, place.first_row, shape.S}, rows, D);
    stage_rows<Element>(values, {args.v, b, h_kv, place.first_row, shape.S}, rows, D);
    __syncthreads();

    // The queries that see one of the keys
    const int first_query = max(place.first_row - (shape.S - T), 0),
              end_query = min(end_row - 1 + shape.window - (shape.S - T), T);
    float dk[rows][lane_elements] = {}, dv[rows][lane_elements] = {};
    for (int h = h_kv * group; h < (h_kv + 1) * group; ++h) {
        for (int query0 = first_query + warp * warp_size; query0 < end_query;
             query0 += Tiling::warps * warp_size) {
            const int query = min(query0 + lane, T - 1);
            const Range range(shape, b, query);
            const bool sees_one =
                query0 + lane < T && range.first < end_row && range.last >= place.first_row;
            if (!__any_sync(all_lanes, sees_one)) continue;
            float scores[rows], dp[rows];
            multiply<rows, packed>(scores, keys, row_of<Element>(args.q, b, h, query), D);
            multiply<rows, packed>(dp, values, row_of<Element>(args.dout, b, h, query), D);
            const int64_t at = (int64_t{b} * shape.H + h) * T + query;
            const float lse = args.lse[at], delta = deltas[at];
            Weights<rows> k_mine, v_mine;
#pragma unroll
            for (int r = 0; r < rows; ++r) {
                const bool seen = query0 + lane < T && range.contains(place.first_row + r);
                const float score = cap(scores[r] * shape.scale);
                v_mine.of[r] = seen ? expf(score - lse) : 0;
                k_mine.of[r] = seen ? v_mine.of[r] * (dp[r] - delta) * cap.slope(score) : 0;
            }
            k_weights[lane] = k_mine;
            v_weights[lane] = v_mine;
            __syncwarp();
            const int count = min(warp_size, T - query0);
            add_rows(dk, k_weights, row_of<Element>(args.q, b, h, query0), args.q.token, count, D);
            add_rows(dv, v_weights, row_of<Element>(args.dout, b, h, query0), args.dout.token,
                     count, D);
            __syncwarp();
        }
    }
    put_sums(dk_sums + warp * rows * D, dk, D, lane);
    put_sums(dv_sums + warp * rows * D, dv, D, lane);
    __syncthreads();
    const auto store = [&](auto of, bool add) {
        merge_and_store<rows, Tiling::warps, decltype(of)>(
            {args.dk, b, h_kv, place.first_row, end_row}, dk_sums, shape.scale, D, add);
        merge_and_store<rows, Tiling::warps, decltype(of)>(
            {args.dv, b, h_kv, place.first_row, end_row}, dv_sums, 1, D, add);
    };
    if (args.key_gradients == KeyGradients::write)
        store(Element{}, false);
    else
        store(float{}, args.key_gradients == KeyGradients::add_fp32);
}

}  // namespace

RowDeltas attention_backward_general(Stream& stream, const AttentionBackward& args) {
    const AttentionShape& shape = args.shape;
    auto* const deltas = stream.scratch_for<float>(attention_backward_general_scratch_bytes(shape));
    with_access(shape, {args.q, args.k, args.v, args.dout}, [&](auto element, auto packed) {
        using Element = decltype(element);
        launch<QueriesTiling>(stream, backward_queries_kernel<Element, packed>,
                              int64_t{shape.B} * shape.H, shape.T, queries_shared_bytes(shape.D),
                              args, deltas);
        launch<KeysTiling>(stream, backward_keys_kernel<Element, packed>,
                           int64_t{shape.B} * shape.H_kv, shape.S, keys_shared_bytes(shape.D), args,
                           deltas);
    });
    return {deltas, 1, shape.T, 1};
}

size_t attention_backward_general_scratch_bytes(const AttentionShape& shape) {
    return sizeof(float) * static_cast<size_t>(shape.B) * static_cast<size_t>(shape.H) *
           static_cast<size_t>(shape.T);
}

}  // namespace train_gpt::cuda
