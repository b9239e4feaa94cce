// Attention for every dtype, head size, layout and number of queries, in fp32 arithmetic without tensor cores. Dao et al.,
// arXiv 2205.14135.
//
// A block has a few rows of one operand (queries, or keys in the pass for dk and dv) in shared memory; its warps share the
// rows of the other, 32 at a time. In a first step a lane has one of the 32 rows and forms its products with all rows of
// the block; in the second a lane has every 32nd element of the head and adds up the 32 rows with the weights that came of
// the products. At the end the sums of the warps are added, in the order of the warps.
#include <limits>

#include "kernels/attention_cuda.h"
#include "kernels/cuda.h"
#include "kernels/cuda_block.cuh"

namespace train_gpt::cuda {

namespace {

constexpr int largest_head = 256, lane_elements = largest_head / warp_size;
constexpr unsigned all_lanes = 0xffffffffu;

/// Rows and warps of a block. Many rows make each row that is read count for more; a single query, in sampling, has its
/// keys shared by many warps. The sums of dk and dv need twice the registers.
template <int rows_, int warps_>
struct Cut {
    static constexpr int rows = rows_, warps = warps_, threads = warps * warp_size;
};
using QueriesCut = Cut<8, 4>;
using QueryCut = Cut<1, 16>;
using KeysCut = Cut<4, 4>;

/// Elements of a row padded to whole packs of 4.
__host__ __device__ constexpr int padded(int D) { return (D + 3) / 4 * 4; }

/// One weight for each row of the block.
template <int rows>
struct alignas(rows * sizeof(float)) Weights {
    float of[rows];
};

template <class Element>
__device__ __forceinline__ const Element* row_of(const HeadsView& view, int b, int h, int t) {
    return static_cast<const Element*>(view.data) + b * view.batch + h * view.head + t * view.token;
}

/// Rows t, t + 1, … of a head as floats in shared memory; zeros from row `end` and element D on.
template <class Element>
__device__ void stage_rows(float* to, const HeadsView& view, int b, int h, int t, int rows, int end,
                           int D) {
    for (int i = static_cast<int>(threadIdx.x); i < rows * padded(D);
         i += static_cast<int>(blockDim.x)) {
        const int row = t + i / padded(D), d = i % padded(D);
        to[i] = row < end && d < D ? to_float(row_of<Element>(view, b, h, row)[d]) : 0;
    }
}

/// products[r] = Σ rows[r]·other. Packed: `other` may be read four elements at a time.
template <int rows, bool packed, class Element>
__device__ __forceinline__ void multiply(float (&products)[rows], const float* staged,
                                         const Element* other, int D) {
#pragma unroll
    for (int r = 0; r < rows; ++r) products[r] = 0;
    if constexpr (packed) {
#pragma unroll 4
        for (int d = 0; d < D; d += 4) {
            struct alignas(4 * sizeof(Element)) Four {
                Element x[4];
            } four = *reinterpret_cast<const Four*>(other + d);
#pragma unroll
            for (int r = 0; r < rows; ++r) {
                const float4 mine = *reinterpret_cast<const float4*>(staged + r * padded(D) + d);
                products[r] += mine.x * to_float(four.x[0]) + mine.y * to_float(four.x[1]) +
                               mine.z * to_float(four.x[2]) + mine.w * to_float(four.x[3]);
            }
        }
    } else {
        for (int d = 0; d < D; ++d) {
            const float x = to_float(other[d]);
#pragma unroll
            for (int r = 0; r < rows; ++r) products[r] += staged[r * padded(D) + d] * x;
        }
    }
}

/// sums[r][i] += Σ weights[j].of[r]·(element 32·i + lane of row j), over `count` rows.
template <int rows, class Element>
__device__ __forceinline__ void add_rows(float (&sums)[rows][lane_elements],
                                         const Weights<rows>* weights, const Element* others,
                                         int64_t stride, int count, int D, int lane) {
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
        const Weights<rows> w = weights[j];
#pragma unroll
        for (int i = 0; i < lane_elements; ++i) {
            if (i * warp_size >= D) break;
            const int d = i * warp_size + lane;
            const float x = d < D ? to_float(others[j * stride + d]) : 0;
#pragma unroll
            for (int r = 0; r < rows; ++r) sums[r][i] += w.of[r] * x;
        }
    }
}

/// A warp's sums to shared memory, [rows, D].
template <int rows>
__device__ __forceinline__ void put_sums(float* to, const float (&sums)[rows][lane_elements], int D,
                                         int lane) {
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
        for (int i = 0; i < lane_elements; ++i)
            if (const int d = i * warp_size + lane; d < D) to[r * D + d] = sums[r][i];
}

/// Adds up the warps' sums and writes factor·sum to rows t, t + 1, … before `end`.
template <int rows, int warps, class Element>
__device__ void merge_and_store(const HeadsView& view, int b, int h, int t, int end,
                                const float* warp_sums, float factor, int D) {
    for (int i = static_cast<int>(threadIdx.x); i < rows * D && t + i / D < end;
         i += static_cast<int>(blockDim.x)) {
        float sum = 0;
        for (int warp = 0; warp < warps; ++warp) sum += warp_sums[warp * rows * D + i];
        static_cast<Element*>(
            view.data)[b * view.batch + h * view.head + (t + i / D) * view.token + i % D] =
            from_float<Element>(factor * sum);
    }
}

/// The first and the last key that query t sees.
struct Range {
    int first, last;

    __device__ __forceinline__ Range(const AttentionShape& shape, int b, int t)
        : first(shape.doc_start ? shape.doc_start[int64_t{b} * shape.T + t] : 0),
          last(t + shape.S - shape.T) {}
    __device__ __forceinline__ bool contains(int key) const { return key >= first && key <= last; }
};

/// Which rows of which head a block has; the blocks with most work come first.
struct Place {
    int b, h, first_row;

    __device__ __forceinline__ Place(int heads, int length, int rows, bool last_first) {
        const int tiles = ceil_div(length, rows),
                  all = static_cast<int>(gridDim.x / static_cast<unsigned>(tiles));
        const int tile = static_cast<int>(blockIdx.x) / all,
                  head = static_cast<int>(blockIdx.x) % all;
        b = head / heads;
        h = head % heads;
        first_row = (last_first ? tiles - 1 - tile : tile) * rows;
    }
};

size_t floats(int64_t count) { return static_cast<size_t>(count) * sizeof(float); }

// ----------------------------------------------------------------------------------------------------------- forward

template <class Cut>
size_t forward_shared_bytes(int D) {
    return floats(Cut::rows * padded(D) +
                  Cut::warps * (warp_size * Cut::rows + Cut::rows * D + 2 * Cut::rows));
}

/// out and lse of Cut::rows queries of one head. Shared: the queries, and for each warp 32 weights per query, its sums of
/// values, and its row maxima and sums.
template <class Element, class Cut, bool packed>
__global__ void __launch_bounds__(Cut::threads, Cut::warps <= 4 ? 2 : 1)
    forward_kernel(const AttentionForward args) {
    constexpr int rows = Cut::rows;
    const AttentionShape& shape = args.shape;
    const int D = shape.D, warp = static_cast<int>(threadIdx.x / warp_size),
              lane = static_cast<int>(threadIdx.x % warp_size);
    const Place place(shape.H, shape.T, rows, true);
    const int b = place.b, h = place.h, h_kv = h / (shape.H / shape.H_kv),
              end_row = min(place.first_row + rows, shape.T);

    extern __shared__ float4 memory[];
    auto* const queries = reinterpret_cast<float*>(memory);
    auto* const all_weights = reinterpret_cast<Weights<rows>*>(queries + rows * padded(D));
    Weights<rows>* const weights = all_weights + warp * warp_size;
    auto* const warp_sums = reinterpret_cast<float*>(all_weights + Cut::warps * warp_size);
    float *const warp_max = warp_sums + Cut::warps * rows * D, *const warp_total =
                                                                   warp_max + Cut::warps * rows;

    stage_rows<Element>(queries, args.q, b, h, place.first_row, rows, shape.T, D);
    __syncthreads();

    const int last_key = end_row - 1 + shape.S - shape.T;
    int first_key = last_key;
    for (int t = place.first_row; t < end_row; ++t)
        first_key = min(first_key, Range(shape, b, t).first);

    float sums[rows][lane_elements] = {}, row_max[rows], row_sum[rows] = {};
    // Finite: an infinite maximum less itself is not a number, and rows may see nothing of the first keys.
#pragma unroll
    for (int r = 0; r < rows; ++r) row_max[r] = std::numeric_limits<float>::lowest();
    for (int key0 = first_key + warp * warp_size; key0 <= last_key;
         key0 += Cut::warps * warp_size) {
        const int key = key0 + lane;
        float scores[rows];
        multiply<rows, packed>(scores, queries,
                               row_of<Element>(args.k, b, h_kv, min(key, last_key)), D);
        Weights<rows> mine;
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const bool seen = Range(shape, b, min(place.first_row + r, end_row - 1)).contains(key);
            const float score =
                seen ? scores[r] * shape.scale : -std::numeric_limits<float>::infinity();
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
                 min(warp_size, last_key + 1 - key0), D, lane);
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

    // Per row: the largest maximum, and how much of each warp's sums counts.
    if (const int r = static_cast<int>(threadIdx.x); r < rows) {
        float largest = warp_max[r], total = 0;
        for (int w = 1; w < Cut::warps; ++w) largest = fmaxf(largest, warp_max[w * rows + r]);
        for (int w = 0; w < Cut::warps; ++w)
            total += warp_total[w * rows + r] * expf(warp_max[w * rows + r] - largest);
        for (int w = 0; w < Cut::warps; ++w)
            warp_total[w * rows + r] = expf(warp_max[w * rows + r] - largest) / total;
        if (args.lse && place.first_row + r < end_row)
            args.lse[(int64_t{b} * shape.H + h) * shape.T + place.first_row + r] =
                largest + logf(total);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < rows * D; i += static_cast<int>(blockDim.x))
        for (int w = 0; w < Cut::warps; ++w)
            warp_sums[w * rows * D + i] *= warp_total[w * rows + i / D];
    __syncthreads();
    merge_and_store<rows, Cut::warps, Element>(args.out, b, h, place.first_row, end_row, warp_sums,
                                               1, D);
}

// ---------------------------------------------------------------------------------------------------------- backward

size_t queries_shared_bytes(int D) {
    using Cut = QueriesCut;
    return floats(2 * Cut::rows * padded(D) + Cut::warps * (warp_size * Cut::rows + Cut::rows * D) +
                  2 * Cut::rows);
}

/// dq of QueriesCut::rows queries of one head, and their delta = Σ dout·out for the other kernel. Shared: queries, dout, for
/// each warp 32 weights per query and its sums, and lse and delta.
template <class Element, bool packed>
__global__ void __launch_bounds__(QueriesCut::threads, 2)
    backward_queries_kernel(const AttentionBackward args, float* deltas) {
    using Cut = QueriesCut;
    constexpr int rows = Cut::rows;
    const AttentionShape& shape = args.shape;
    const int D = shape.D, warp = static_cast<int>(threadIdx.x / warp_size),
              lane = static_cast<int>(threadIdx.x % warp_size);
    const Place place(shape.H, shape.T, rows, true);
    const int b = place.b, h = place.h, h_kv = h / (shape.H / shape.H_kv),
              end_row = min(place.first_row + rows, shape.T);

    extern __shared__ float4 memory[];
    auto* const queries = reinterpret_cast<float*>(memory);
    float* const douts = queries + rows * padded(D);
    auto* const all_weights = reinterpret_cast<Weights<rows>*>(douts + rows * padded(D));
    Weights<rows>* const weights = all_weights + warp * warp_size;
    auto* const warp_sums = reinterpret_cast<float*>(all_weights + Cut::warps * warp_size);
    float *const lse = warp_sums + Cut::warps * rows * D, *const delta = lse + rows;

    stage_rows<Element>(queries, args.q, b, h, place.first_row, rows, shape.T, D);
    stage_rows<Element>(douts, args.dout, b, h, place.first_row, rows, shape.T, D);
    __syncthreads();
    for (int r = warp; r < rows; r += Cut::warps) {
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

    const int last_key = end_row - 1;
    int first_key = last_key;
    for (int t = place.first_row; t < end_row; ++t)
        first_key = min(first_key, Range(shape, b, t).first);

    float sums[rows][lane_elements] = {};
    for (int key0 = first_key + warp * warp_size; key0 <= last_key;
         key0 += Cut::warps * warp_size) {
        const int key = key0 + lane;
        float scores[rows], dp[rows];
        multiply<rows, packed>(scores, queries,
                               row_of<Element>(args.k, b, h_kv, min(key, last_key)), D);
        multiply<rows, packed>(dp, douts, row_of<Element>(args.v, b, h_kv, min(key, last_key)), D);
        Weights<rows> mine;
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const bool seen = Range(shape, b, min(place.first_row + r, end_row - 1)).contains(key);
            mine.of[r] = seen ? expf(scores[r] * shape.scale - lse[r]) * (dp[r] - delta[r]) : 0;
        }
        weights[lane] = mine;
        __syncwarp();
        add_rows(sums, weights, row_of<Element>(args.k, b, h_kv, key0), args.k.token,
                 min(warp_size, last_key + 1 - key0), D, lane);
        __syncwarp();
    }
    put_sums(warp_sums + warp * rows * D, sums, D, lane);
    __syncthreads();
    merge_and_store<rows, Cut::warps, Element>(args.dq, b, h, place.first_row, end_row, warp_sums,
                                               shape.scale, D);
}

size_t keys_shared_bytes(int D) {
    using Cut = KeysCut;
    return floats(2 * Cut::rows * padded(D) +
                  2 * Cut::warps * (warp_size * Cut::rows + Cut::rows * D));
}

/// dk and dv of KeysCut::rows keys of one key head. Shared: keys, values, and for each warp 32 weights per key and its sums,
/// of dk and of dv.
template <class Element, bool packed>
__global__ void __launch_bounds__(KeysCut::threads, 2)
    backward_keys_kernel(const AttentionBackward args, const float* deltas) {
    using Cut = KeysCut;
    constexpr int rows = Cut::rows;
    const AttentionShape& shape = args.shape;
    const int D = shape.D, T = shape.T, warp = static_cast<int>(threadIdx.x / warp_size),
              lane = static_cast<int>(threadIdx.x % warp_size);
    const Place place(shape.H_kv, shape.S, rows, false);
    const int b = place.b, h_kv = place.h, group = shape.H / shape.H_kv,
              end_row = min(place.first_row + rows, shape.S);

    extern __shared__ float4 memory[];
    auto* const keys = reinterpret_cast<float*>(memory);
    float* const values = keys + rows * padded(D);
    auto* const all_weights = reinterpret_cast<Weights<rows>*>(values + rows * padded(D));
    Weights<rows>*const k_weights = all_weights + warp * warp_size, *const v_weights =
                                                                        k_weights +
                                                                        Cut::warps * warp_size;
    auto *const dk_sums = reinterpret_cast<float*>(all_weights + 2 * Cut::warps * warp_size),
                *const dv_sums = dk_sums + Cut::warps * rows * D;

    stage_rows<Element>(keys, args.k, b, h_kv, place.first_row, rows, shape.S, D);
    stage_rows<Element>(values, args.v, b, h_kv, place.first_row, rows, shape.S, D);
    __syncthreads();

    float dk[rows][lane_elements] = {}, dv[rows][lane_elements] = {};
    for (int h = h_kv * group; h < (h_kv + 1) * group; ++h) {
        for (int query0 = place.first_row + warp * warp_size; query0 < T;
             query0 += Cut::warps * warp_size) {
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
                v_mine.of[r] = seen ? expf(scores[r] * shape.scale - lse) : 0;
                k_mine.of[r] = seen ? v_mine.of[r] * (dp[r] - delta) : 0;
            }
            k_weights[lane] = k_mine;
            v_weights[lane] = v_mine;
            __syncwarp();
            const int count = min(warp_size, T - query0);
            add_rows(dk, k_weights, row_of<Element>(args.q, b, h, query0), args.q.token, count, D,
                     lane);
            add_rows(dv, v_weights, row_of<Element>(args.dout, b, h, query0), args.dout.token,
                     count, D, lane);
            __syncwarp();
        }
    }
    put_sums(dk_sums + warp * rows * D, dk, D, lane);
    put_sums(dv_sums + warp * rows * D, dv, D, lane);
    __syncthreads();
    merge_and_store<rows, Cut::warps, Element>(args.dk, b, h_kv, place.first_row, end_row, dk_sums,
                                               shape.scale, D);
    merge_and_store<rows, Cut::warps, Element>(args.dv, b, h_kv, place.first_row, end_row, dv_sums,
                                               1, D);
}

// ------------------------------------------------------------------------------------------------------------ launch

/// Calls f with the element type and whether rows of all views may be read in packs of 4.
template <class F>
void with_access(const AttentionShape& shape, std::initializer_list<HeadsView> views, F&& f) {
    with_element_type(shape.dtype, [&](auto element) {
        bool packed = shape.D % 4 == 0;
        for (const HeadsView& view : views)
            packed = packed && reinterpret_cast<uintptr_t>(view.data) % (4 * sizeof element) == 0 &&
                     view.batch % 4 == 0 && view.token % 4 == 0 && view.head % 4 == 0;
        if (packed)
            f(element, std::true_type{});
        else
            f(element, std::false_type{});
    });
}

template <class Cut, class Kernel, class... Arguments>
void launch(const Stream& stream, Kernel* kernel, int64_t heads, int length, size_t shared_bytes,
            const Arguments&... arguments) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)));
    kernel<<<static_cast<unsigned>(heads * ceil_div(length, Cut::rows)), Cut::threads, shared_bytes,
             stream_of(stream)>>>(arguments...);
    CUDA_CHECK_LAUNCH();
}

}  // namespace

void attention_forward_general(Stream& stream, const AttentionForward& args) {
    const AttentionShape& shape = args.shape;
    with_access(shape, {args.k}, [&](auto element, auto packed) {
        const auto run = [&](auto cut) {
            using Cut = decltype(cut);
            launch<Cut>(stream, forward_kernel<decltype(element), Cut, packed>,
                        int64_t{shape.B} * shape.H, shape.T, forward_shared_bytes<Cut>(shape.D),
                        args);
        };
        if (shape.T == 1)
            run(QueryCut{});
        else
            run(QueriesCut{});
    });
}

void attention_backward_general(Stream& stream, const AttentionBackward& args) {
    const AttentionShape& shape = args.shape;
    auto* const deltas = stream.scratch_for<float>(attention_backward_general_scratch_bytes(shape));
    with_access(shape, {args.q, args.k, args.v, args.dout}, [&](auto element, auto packed) {
        using Element = decltype(element);
        launch<QueriesCut>(stream, backward_queries_kernel<Element, packed>,
                           int64_t{shape.B} * shape.H, shape.T, queries_shared_bytes(shape.D), args,
                           deltas);
        launch<KeysCut>(stream, backward_keys_kernel<Element, packed>,
                        int64_t{shape.B} * shape.H_kv, shape.S, keys_shared_bytes(shape.D), args,
                        deltas);
    });
}

size_t attention_backward_general_scratch_bytes(const AttentionShape& shape) {
    return sizeof(float) * static_cast<size_t>(shape.B) * static_cast<size_t>(shape.H) *
           static_cast<size_t>(shape.T);
}

}  // namespace train_gpt::cuda
