// Shared by the general kernels of attention, which handle every dtype, head size, layout and
// number of queries, in fp32 arithmetic without tensor cores. Dao et al., arXiv 2205.14135.
//
// A block holds a few rows of one operand (queries, or keys in the pass for dk and dv) in shared
// memory; its warps divide the rows of the other operand among themselves, 32 at a time. In the
// first step, a lane has one of the 32 rows and computes its products with all rows of the block.
// In the second step, a lane has every 32nd element of the head and adds up the 32 rows with the
// weights computed from the products. At the end, the sums of the warps are added in the order of
// the warps.
#pragma once
#include <initializer_list>
#include <type_traits>

#include "device/cuda_queue.h"
#include "kernels/attention/attention.h"
#include "kernels/cuda_block.cuh"

namespace train_gpt::cuda::general {

constexpr int largest_head = 256, lane_elements = largest_head / warp_size;
constexpr unsigned all_lanes = 0xffffffffu;

/// Rows and warps of a block. With more rows, each row that is read from the other operand is used
/// more often. For a single query, in sampling, the keys are divided among many warps. The sums of
/// dk and dv need twice the registers.
template <int rows_, int warps_>
struct Tiling {
    static constexpr int rows = rows_, warps = warps_, threads = warps * warp_size;
};
using QueriesTiling = Tiling<8, 4>;
using SingleQueryTiling = Tiling<1, 16>;
using KeysTiling = Tiling<4, 4>;

/// The number of elements of a row, padded to whole packs of 4.
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

/// Rows `first` to `end` − 1 of a head.
struct HeadRows {
    const HeadsView& view;
    int b, h, first, end;
};

/// Copies `rows` rows of a head, from row `from.first` on, to shared memory as floats, with zeros
/// from row `from.end` and from element D on.
template <class Element>
__device__ void stage_rows(float* to, const HeadRows& from, int rows, int D) {
    for (int i = static_cast<int>(threadIdx.x); i < rows * padded(D);
         i += static_cast<int>(blockDim.x)) {
        const int row = from.first + i / padded(D), d = i % padded(D);
        to[i] = row < from.end && d < D
                    ? to_float(row_of<Element>(from.view, from.b, from.h, row)[d])
                    : 0;
    }
}

/// products[r] = Σ_d staged[r, d]·other[d]. If `packed`, `other` may be read four elements at a
/// time.
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
                                         int64_t stride, int count, int D) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
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

/// Writes a warp's sums to shared memory, [rows, D].
template <int rows>
__device__ __forceinline__ void put_sums(float* to, const float (&sums)[rows][lane_elements], int D,
                                         int lane) {
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
        for (int i = 0; i < lane_elements; ++i)
            if (const int d = i * warp_size + lane; d < D) to[r * D + d] = sums[r][i];
}

/// Adds up the warps' sums and writes factor·sum to the rows or, with `add`, adds it to them.
template <int rows, int warps, class Element>
__device__ void merge_and_store(const HeadRows& to_rows, const float* warp_sums, float factor,
                                int D, bool add = false) {
    const HeadsView& view = to_rows.view;
    for (int i = static_cast<int>(threadIdx.x); i < rows * D && to_rows.first + i / D < to_rows.end;
         i += static_cast<int>(blockDim.x)) {
        float sum = 0;
        for (int warp = 0; warp < warps; ++warp) sum += warp_sums[warp * rows * D + i];
        Element& to =
            static_cast<Element*>(view.data)[to_rows.b * view.batch + to_rows.h * view.head +
                                             (to_rows.first + i / D) * view.token + i % D];
        to = from_float<Element>(add ? to_float(to) + factor * sum : factor * sum);
    }
}

/// The first and the last key that query t sees. The window is at most S.
struct Range {
    int first, last;

    __device__ __forceinline__ Range(const AttentionShape& shape, int b, int t)
        : first(max(shape.doc_start ? shape.doc_start[int64_t{b} * shape.T + t] : 0,
                    t + shape.S - shape.T + 1 - shape.window)),
          last(t + shape.S - shape.T) {}
    __device__ __forceinline__ bool contains(int key) const { return key >= first && key <= last; }
};

/// Which rows of which head a block processes; the blocks with the most work come first.
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

/// A score's soft-cap, if the shape has one (kernels/softcap_math.cuh).
struct ScoreCap {
    float cap;

    __device__ __forceinline__ explicit ScoreCap(const AttentionShape& shape)
        : cap(shape.softcap) {}
    __device__ __forceinline__ float operator()(float score) const {
        return cap == 0 ? score : cap * tanhf(score / cap);
    }
    /// Its derivative, from the capped score.
    __device__ __forceinline__ float slope(float capped) const {
        const float t = cap == 0 ? 0.0f : capped / cap;
        return 1.0f - t * t;
    }
};

inline size_t floats(int64_t count) { return static_cast<size_t>(count) * sizeof(float); }

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

template <class Tiling, class Kernel, class... Arguments>
void launch(const Stream& stream, Kernel* kernel, int64_t heads, int length, size_t shared_bytes,
            const Arguments&... arguments) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)));
    kernel<<<static_cast<unsigned>(heads * ceil_div(length, Tiling::rows)), Tiling::threads,
             shared_bytes, stream_of(stream)>>>(arguments...);
    CUDA_CHECK_LAUNCH();
}

}  // namespace train_gpt::cuda::general
