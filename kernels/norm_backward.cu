// The backward pass of norms; norm.cu has the forward pass.
#include <algorithm>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/cuda_cluster.cuh"
#include "kernels/norm.h"

namespace train_gpt::cuda {

namespace {

// Memory-bound: the kernel reads each row once, in 16-byte packs. Each thread holds three fp32
// column sums per element of its part of a row. With 8 elements per thread, 80 registers are
// enough, and two blocks of 384 threads run on a multiprocessor; rows of more than 3072 elements
// take 16 elements and 128 registers per thread. Incoming rows are staged in shared memory: while
// one is processed, `stages` − 1 are being read. A block processes several rows side by side, which
// keeps the number of partial sums small. The column sums of more than 8192 elements do not fit
// into a multiprocessor: such a row is shared by a cluster of 2, 4 or 8 blocks, which run at the
// same time and read each other's sums of the row from shared memory. Each block keeps its part of
// w in shared memory; where that is full, w is read again for each row, from L1.
struct ShortRows {
    static constexpr int elements = 8, max_threads = 384, blocks_per_multiprocessor = 2;
    static constexpr int max_blocks = 1, max_columns = elements * max_threads;
    /// As many bytes on their way in fp32 as in bf16.
    template <class T>
    static constexpr int stages = sizeof(T) == 2 ? 3 : 2;
};
struct LongRows {
    static constexpr int elements = 16, max_threads = 512, blocks_per_multiprocessor = 1;
    static constexpr int max_blocks = 1, max_columns = elements * max_threads;
    template <class T>
    static constexpr int stages = 2;
};
struct WideRows {
    static constexpr int elements = 16, max_threads = 512, blocks_per_multiprocessor = 1;
    static constexpr int max_blocks = max_cluster_blocks;
    template <class T>
    static constexpr int stages = 2;
};
/// Rows that do not consist of whole packs (C not a multiple of the pack size, or a view that
/// starts at any address), still longer ones, and wide ones on GPUs without clusters (before sm_90)
/// use backward_any, which visits a row twice and relies on the caches.
constexpr int any_threads = 256;

/// The maximum number of blocks that sum columns, which bounds the scratch memory. 512 allow three
/// blocks on each of 160 multiprocessors.
int max_backward_blocks(int64_t C) { return C <= 2048 ? 512 : 256; }

template <class T>
struct BackwardArgs {
    T* dres;
    const T *dy, *x, *w;
    const float* stats;
    float* partials;  // [blocks or clusters, 3, C]: column sums of each for dw, db and dbias
    int64_t M;
    int C;
    bool rms;
    bool writes_sums[3];  // of dw, db and dbias: those that have a sink
    bool keeps_weights = false;
};

/// Sums two values over a warp together: lanes 0–15 return the total of a, lanes 16–31 that of b.
__device__ __forceinline__ float warp_sum_pair(float a, float b) {
    const bool upper = threadIdx.x & 16;
    float kept = upper ? b : a;
    kept += __shfl_xor_sync(0xffffffffu, upper ? a : b, 16);
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2)
        kept += __shfl_xor_sync(0xffffffffu, kept, distance);
    return kept;
}

/// A barrier for the threads of one row, which are whole warps.
__device__ __forceinline__ void row_barrier() {
    if (blockDim.x == warp_size)
        __syncwarp();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
}

/// The blocks that share a row; with other shapes, each block is alone.
template <class Shape>
using RowCluster = Cluster<(Shape::max_blocks > 1)>;

/// The totals of two values over the threads of a row; `sums`: the row's shared memory, in which
/// warp i of up to 16 has places 2i and 2i + 1. Of other blocks', `at_once` are loaded together.
template <class Shape, int at_once>
__device__ __forceinline__ float2 row_total_of_pairs(float* sums, float a, float b) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size;
    const bool has_place = lane < 2 * static_cast<int>(blockDim.x) / warp_size;
    const float pair = warp_sum_pair(a, b);
    if (thread % 16 == 0) sums[thread / 16] = pair;
    float own = 0;
    if (RowCluster<Shape>::is_alone) {
        row_barrier();
        if (has_place) own = sums[lane];
    } else {
        RowCluster<Shape>::barrier();
#pragma unroll at_once
        for (int rank = 0; rank < RowCluster<Shape>::size(); ++rank)
            if (has_place) own += RowCluster<Shape>::load(sums + lane, rank);
    }
#pragma unroll
    for (int distance = 2; distance < warp_size; distance *= 2)
        own += __shfl_xor_sync(0xffffffffu, own, distance);
    const float other = __shfl_xor_sync(0xffffffffu, own, 1);
    return lane % 2 == 0 ? float2{own, other} : float2{other, own};
}

/// Starts copying a pack to shared memory. If not `wanted`, nothing is read and zeros are written.
template <class T>
__device__ __forceinline__ void copy_async(Pack<T>* to, const T* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(wanted ? 16 : 0)
                 : "memory");
}

/// The part of a thread in the rows that backward_rows processes: `packs` packs of each row, every
/// blockDim.x-th one of its block's part.
template <class T, class Shape>
struct RowPart {
    static constexpr int size = Pack<T>::size, packs = Shape::elements / size;
    static_assert(Shape::elements % size == 0);

    using Values = float[packs][size];

    static __device__ __forceinline__ int column(int pack) {
        const int packs_before = RowCluster<Shape>::rank() * packs + pack;
        return (packs_before * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * size;
    }
};

/// Rows of dy, x and dres on their way through dynamic shared memory,
/// Pack<T>[blockDim.y][stages][3][packs][blockDim.x]. A thread reads only what it copied itself.
template <class T, class Shape, bool overwrite>
class StagedRows : RowPart<T, Shape> {
  public:
    using RowPart<T, Shape>::packs, RowPart<T, Shape>::size, RowPart<T, Shape>::column;

    __device__ __forceinline__ StagedRows(uint4* shared, int group)
        : staged_(reinterpret_cast<Pack<T>*>(shared) +
                  group * Shape::template stages<T> * stage_packs() +
                  static_cast<int>(threadIdx.x)) {}

    /// Starts copying the next row, whose part for this thread begins at element `at`; a row that
    /// is not `wanted` only takes its turn.
    __device__ __forceinline__ void copy_next(const BackwardArgs<T>& args, int64_t at,
                                              bool wanted) {
        if (wanted) {
            Pack<T>* const to = staged_ + next_;
#pragma unroll
            for (int k = 0; k < packs; ++k) {
                const bool inside = column(k) < args.C;
                const int64_t from = at + k * lanes() * size;
                copy_async(to + k * lanes(), args.dy + from, inside);
                copy_async(to + (packs + k) * lanes(), args.x + from, inside);
                if (!overwrite)
                    copy_async(to + (2 * packs + k) * lanes(), args.dres + from, inside);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        advance(next_);
    }
    /// Waits until the current row has arrived.
    __device__ __forceinline__ void wait() const {
        asm volatile("cp.async.wait_group %0;" ::"n"(Shape::template stages<T> - 1) : "memory");
    }
    /// The current row: element (kind·packs + k)·blockDim.x is pack k of dy, x or dres (`kind` 0,
    /// 1, 2).
    __device__ __forceinline__ const Pack<T>* current() const { return staged_ + current_; }
    __device__ __forceinline__ void next_row() { advance(current_); }

  private:
    static __device__ __forceinline__ int lanes() { return static_cast<int>(blockDim.x); }
    static __device__ __forceinline__ int stage_packs() { return 3 * packs * lanes(); }
    static __device__ __forceinline__ void advance(int& stage) {
        stage =
            stage == (Shape::template stages<T> - 1) * stage_packs() ? 0 : stage + stage_packs();
    }

    Pack<T>* staged_;
    int current_ = 0, next_ = 0;  // where in a thread's memory these stages are
};

/// Adds up the column sums dw, db and dbias of the block's groups of threads, one group after the
/// other, in `block_sums` (shared memory, [3, columns of the block]), and writes those that are
/// wanted to the partials. The blocks of a cluster write their parts of the same partials.
template <class T, class Shape>
__device__ __forceinline__ void write_column_sums(const BackwardArgs<T>& args,
                                                  Pack<float>* block_sums,
                                                  const typename RowPart<T, Shape>::Values& dw,
                                                  const typename RowPart<T, Shape>::Values& db,
                                                  const typename RowPart<T, Shape>::Values& dbias) {
    using Part = RowPart<T, Shape>;
    constexpr int size = Pack<float>::size;
    const int lanes = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x),
              group = static_cast<int>(threadIdx.y), groups = static_cast<int>(blockDim.y),
              columns = Part::packs * lanes * Part::size;
    // Where the sums of column `column` of the block and the next three are. A thread's columns are
    // two of these packs in bf16; packs that are 8 apart change places so that the threads of a
    // request use all banks.
    const auto at = [&](int kind, int column) -> Pack<float>& {
        const int pack = (kind * columns + column) / size;
        return block_sums[pack ^ (pack >> 3 & 1)];
    };
    for (int turn = 0; turn < groups; ++turn) {
        __syncthreads();
        if (group != turn) continue;
        const auto add = [&](int kind, const typename Part::Values& sums) {
#pragma unroll
            for (int k = 0; k < Part::packs; ++k) {
#pragma unroll
                for (int i = 0; i < Part::size; i += size) {
                    Pack<float>& place = at(kind, (k * lanes + thread) * Part::size + i);
                    Pack<float> sum = {};
                    if (turn > 0) sum = place;
#pragma unroll
                    for (int j = 0; j < size; ++j) sum[j] += sums[k][i + j];
                    place = sum;
                }
            }
        };
        add(0, dw);
        add(1, db);
        add(2, dbias);
    }
    __syncthreads();
    const unsigned cluster = blockIdx.x / static_cast<unsigned>(RowCluster<Shape>::size());
    float* const partials = args.partials + int64_t{cluster} * 3 * args.C;
    const int before = RowCluster<Shape>::rank() * columns, in_row = min(columns, args.C - before);
#pragma unroll
    for (int kind = 0; kind < 3; ++kind) {
        if (!args.writes_sums[kind]) continue;
        for (int column = (group * lanes + thread) * size; column < in_row;
             column += groups * lanes * size)
            at(kind, column).store(partials + kind * args.C + before + column);
    }
}

/// A block processes blockDim.y rows at a time, each with blockDim.x threads: whole warps with C <=
/// blockDim.x · elements. It takes every gridDim.x-th group of rows, reads dy, x and dres once,
/// writes dres and, at the end, its column sums. Dynamic shared memory: that of StagedRows. A
/// cluster does the same together, with blockDim.y = 1; each block has a part of the columns.
template <class T, class Shape, bool overwrite>
__global__ void __launch_bounds__(Shape::max_threads, Shape::blocks_per_multiprocessor)
    backward_rows(BackwardArgs<T> args) {
    using Part = RowPart<T, Shape>;
    constexpr int size = Part::size, packs = Part::packs;
    // In fp32, 16 elements leave no registers for g and x̂: these are computed once more.
    constexpr bool keeps_row = Shape::elements * sizeof(T) < 64;
    constexpr int at_once = keeps_row ? 2 : 1;
    __shared__ float warp_sums[2][2 * Shape::max_threads / warp_size];
    extern __shared__ uint4 dynamic_shared[];
    const int lanes = static_cast<int>(blockDim.x), group = static_cast<int>(threadIdx.y),
              warps = lanes / warp_size;

    const auto blocks = static_cast<unsigned>(RowCluster<Shape>::size());
    const int64_t first_row = int64_t{blockIdx.x / blocks} * blockDim.y + group;
    const int stride = static_cast<int>(gridDim.x / blocks * blockDim.y);
    // From a row to the thread's `ahead`-th next one.
    const auto elements = [&](int ahead) { return int64_t{ahead * stride} * args.C; };
    const int rows =
        first_row < args.M ? static_cast<int>(ceil_div<int64_t>(args.M - first_row, stride)) : 0;
    int64_t at = first_row * args.C + Part::column(0);  // the thread's first element of the row
    StagedRows<T, Shape, overwrite> staged(dynamic_shared, group);
#pragma unroll
    for (int i = 0; i + 1 < Shape::template stages<T>; ++i)
        staged.copy_next(args, at + elements(i), i < rows);
    // Lane 0 of a warp reads the mean of its next row, lane 1 the reciprocal deviation.
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const float* stats = args.stats + 2 * first_row + lane;
    float next_stats = rows > 0 && lane < 2 ? *stats : 0.0f;

    const float scale = 1.0f / static_cast<float>(args.C);
    typename Part::Values dw = {}, db = {}, dbias = {};
    Pack<T>* const kept_weights = reinterpret_cast<Pack<T>*>(dynamic_shared) +
                                  blockDim.y * Shape::template stages<T> * 3 * packs * lanes +
                                  threadIdx.x;
    const auto weights = [&](int k) {
        return Part::column(k) < args.C ? Pack<T>::load(args.w + Part::column(k)) : Pack<T>{};
    };
    // A cluster always does.
    const bool keeps_weights = !RowCluster<Shape>::is_alone || args.keeps_weights;
    if (keeps_weights) {
        if (group == 0) {
#pragma unroll
            for (int k = 0; k < packs; ++k) kept_weights[k * lanes] = weights(k);
        }
        __syncthreads();
    }
    for (int left = rows; left > 0; --left, at += elements(1), staged.next_row()) {
        const float mean = __shfl_sync(0xffffffffu, next_stats, 0),
                    rstd = __shfl_sync(0xffffffffu, next_stats, 1);
        stats += 2 * stride;
        if (left > 1 && lane < 2) next_stats = *stats;
        staged.copy_next(args, at + elements(Shape::template stages<T> - 1),
                         left >= Shape::template stages<T>);
        staged.wait();
        const Pack<T>* const from = staged.current();

        // g = dy ⊙ w and x̂ of a pack.
        const auto compute = [&](float(&g)[size], float(&normal)[size], int k) {
            float w[size];
            unpack(w, keeps_weights ? kept_weights[k * lanes] : weights(k));
            unpack(g, from[k * lanes]);
            unpack(normal, from[(packs + k) * lanes]);
#pragma unroll
            for (int i = 0; i < size; ++i) {
                g[i] *= w[i];
                normal[i] = (normal[i] - mean) * rstd;
            }
        };
        typename Part::Values g, normal;
        float sum_g = 0, sum_gx = 0;
#pragma unroll
        for (int k = 0; k < packs; ++k) {
            float dy[size];
            compute(g[k], normal[k], k);
            unpack(dy, from[k * lanes]);
#pragma unroll
            for (int i = 0; i < size; ++i) {
                sum_g += g[k][i];
                sum_gx += g[k][i] * normal[k][i];
                dw[k][i] += dy[i] * normal[k][i];
                db[k][i] += dy[i];
            }
        }
        // One barrier per row is enough, because the next row uses the other half of warp_sums.
        const float2 totals = row_total_of_pairs<Shape, at_once>(
            warp_sums[left % 2] + group * 2 * warps, sum_g, sum_gx);
        const float mean_g = args.rms ? 0.0f : scale * totals.x, mean_gx = scale * totals.y;
#pragma unroll
        for (int k = 0; k < packs; ++k) {
            float dres[size];
            if (!keeps_row) compute(g[k], normal[k], k);
            if (!overwrite) unpack(dres, from[(2 * packs + k) * lanes]);
#pragma unroll
            for (int i = 0; i < size; ++i) {
                const float dx = rstd * (g[k][i] - mean_g - normal[k][i] * mean_gx);
                dres[i] = overwrite ? dx : dres[i] + dx;
            }
            const Pack<T> stored = pack<T>(dres);
            if (Part::column(k) < args.C) stored.store(args.dres + at + k * lanes * size);
            unpack(dres, stored);
#pragma unroll
            for (int i = 0; i < size; ++i) dbias[k][i] += dres[i];
        }
    }
    // No block may end while others read its sums.
    if (!RowCluster<Shape>::is_alone) RowCluster<Shape>::barrier();
    write_column_sums<T, Shape>(args, reinterpret_cast<Pack<float>*>(dynamic_shared), dw, db,
                                dbias);
}

/// Any C and alignment. A block takes every gridDim.x-th row and visits it twice; a thread owns
/// every any_threads-th column and adds to that column's sums in the partials, which stay in the
/// caches.
template <class T, bool overwrite>
__global__ void __launch_bounds__(any_threads) backward_any(BackwardArgs<T> args) {
    __shared__ float shared[2][any_threads / warp_size];
    const float scale = 1.0f / static_cast<float>(args.C);
    float* partials = args.partials + int64_t{blockIdx.x} * 3 * args.C;
    for (int64_t row = blockIdx.x; row < args.M; row += gridDim.x) {
        const T *x = args.x + row * args.C, *dy = args.dy + row * args.C;
        T* dres = args.dres + row * args.C;
        const float mean = args.stats[2 * row], rstd = args.stats[2 * row + 1];
        float sum_g = 0, sum_gx = 0;
        for (int c = static_cast<int>(threadIdx.x); c < args.C; c += any_threads) {
            const float g = to_float(dy[c]) * to_float(args.w[c]);
            sum_g += g;
            sum_gx += g * ((to_float(x[c]) - mean) * rstd);
        }
        // Both sums for both norms: each one's barriers let the next row reuse the other's memory.
        const float total_g = block_sum(sum_g, shared[0]),
                    mean_gx = scale * block_sum(sum_gx, shared[1]);
        const float mean_g = args.rms ? 0.0f : scale * total_g;
        for (int c = static_cast<int>(threadIdx.x); c < args.C; c += any_threads) {
            const float normal = (to_float(x[c]) - mean) * rstd, dy_c = to_float(dy[c]);
            const float dx = rstd * (dy_c * to_float(args.w[c]) - mean_g - normal * mean_gx);
            dres[c] = from_float<T>(overwrite ? dx : to_float(dres[c]) + dx);
            const float terms[3] = {dy_c * normal, dy_c, to_float(dres[c])};
            for (int kind = 0; kind < 3; ++kind) {
                float& sum = partials[kind * args.C + c];
                sum = (row == blockIdx.x ? 0.0f : sum) + terms[kind];
            }
        }
    }
}

struct Sinks {
    GradientSink of[3];  // dw, db, dbias
};

/// sink (+)= Σ_block partials[block]. Each thread block takes 32 columns of sink blockIdx.y. Slice
/// s of 32 adds blocks s, s + 32, …; then the slices are added in order.
constexpr int reduce_slices = 32;
__global__ void __launch_bounds__(warp_size* reduce_slices)
    reduce_partials(const __grid_constant__ Sinks sinks, const float* partials, int blocks, int C) {
    __shared__ float shared[reduce_slices][warp_size];
    const GradientSink& sink = sinks.of[blockIdx.y];
    if (!sink.data) return;
    const int c = static_cast<int>(blockIdx.x) * warp_size + static_cast<int>(threadIdx.x);
    float sum = 0;
    if (c < C) {
#pragma unroll 4
        for (int block = static_cast<int>(threadIdx.y); block < blocks; block += reduce_slices)
            sum += partials[(int64_t{block} * 3 + blockIdx.y) * C + c];
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= C) return;
    float* out = static_cast<float*>(sink.data) + c;
    float total = sink.accumulate ? *out : 0.0f;
    for (int slice = 0; slice < reduce_slices; ++slice) total += shared[slice][threadIdx.x];
    *out = total;
}

/// The launch configuration of backward_rows for rows of which a block takes C elements. A
/// multiprocessor runs `resident` blocks.
struct BackwardLaunch {
    int64_t threads, groups, resident;
    bool keeps_weights;
    size_t shared_bytes;
};

template <class T, class Shape>
BackwardLaunch backward_launch(int64_t M, int64_t C, bool keeps_weights) {
    constexpr int packs = Shape::elements / Pack<T>::size;
    const int64_t threads = ceil_div<int64_t>(C, Shape::elements * warp_size) * warp_size;
    const int64_t groups = std::clamp<int64_t>(Shape::max_threads / threads, 1, M);
    const int64_t row_packs = packs * threads;
    return {
        threads, groups, Shape::max_threads * Shape::blocks_per_multiprocessor / (threads * groups),
        keeps_weights,
        static_cast<size_t>(row_packs * (groups * 3 * Shape::template stages<T> + keeps_weights)) *
            sizeof(Pack<T>)};
}

template <class Shape>
bool fits(const BackwardLaunch& launch, const DeviceLimits& limits) {
    constexpr size_t warp_sums = sizeof(float[2][2 * Shape::max_threads / warp_size]);
    return launch.threads <= Shape::max_threads &&
           launch.shared_bytes + warp_sums <= limits.shared_bytes_per_block;
}

// These functions launch the kernel that writes dres and the partials, and return the number of
// partial sums for each column. This number, and with it the order of the sums, depends on the
// number of multiprocessors.

template <class T, bool overwrite>
int launch_any(Stream& stream, const BackwardArgs<T>& args) {
    const auto blocks = static_cast<int>(std::min<int64_t>(
        {args.M, limits_of(stream).multiprocessors, max_backward_blocks(args.C)}));
    backward_any<T, overwrite><<<blocks, any_threads, 0, stream_of(stream)>>>(args);
    return blocks;
}

template <class T, class Shape, bool overwrite>
int launch_blocks(Stream& stream, BackwardArgs<T> args) {
    const DeviceLimits& limits = limits_of(stream);
    BackwardLaunch launch = backward_launch<T, Shape>(args.M, args.C, true);
    if (!fits<Shape>(launch, limits)) launch = backward_launch<T, Shape>(args.M, args.C, false);
    args.keeps_weights = launch.keeps_weights;
    if (!fits<Shape>(launch, limits)) return launch_any<T, overwrite>(stream, args);
    const auto kernel = backward_rows<T, Shape, overwrite>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(launch.shared_bytes)));
    const auto blocks = static_cast<int>(
        std::min<int64_t>({ceil_div(args.M, launch.groups),
                           limits.multiprocessors * launch.resident, max_backward_blocks(args.C)}));
    const dim3 block(static_cast<unsigned>(launch.threads), static_cast<unsigned>(launch.groups));
    kernel<<<blocks, block, launch.shared_bytes, stream_of(stream)>>>(args);
    return blocks;
}

/// One row at a time for each cluster, of the smallest size for which the row fits.
template <class T, bool overwrite>
int launch_clusters(Stream& stream, BackwardArgs<T> args) {
    const DeviceLimits& limits = limits_of(stream);
    const auto kernel = backward_rows<T, WideRows, overwrite>;
    const auto launch_for = [&](int64_t size) {
        return backward_launch<T, WideRows>(1, ceil_div<int64_t>(args.C, size), true);
    };
    unsigned size = 2;
    while (size < WideRows::max_blocks && !fits<WideRows>(launch_for(size), limits)) size *= 2;
    const BackwardLaunch launch = launch_for(size);
    if (!fits<WideRows>(launch, limits)) return launch_any<T, overwrite>(stream, args);
    ClusterLaunch in_clusters(stream, size, static_cast<unsigned>(launch.threads),
                              launch.shared_bytes);
    if (!in_clusters.has_clusters(limits, kernel)) return launch_any<T, overwrite>(stream, args);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(launch.shared_bytes)));
    const int resident = in_clusters.resident(kernel);
    if (resident == 0) return launch_any<T, overwrite>(stream, args);
    const auto clusters =
        static_cast<int>(std::min<int64_t>({args.M, resident, max_backward_blocks(args.C)}));
    in_clusters.config.gridDim = static_cast<unsigned>(clusters) * size;
    CUDA_CHECK(cudaLaunchKernelEx(&in_clusters.config, kernel, args));
    return clusters;
}

template <class T, bool overwrite>
int backward(Stream& stream, const NormBackward& args, const BackwardArgs<T>& kernel_args) {
    const int64_t C = kernel_args.C;
    if (!rows_are_packed<T>(C, args.dy, args.x, args.dres, args.w))
        return launch_any<T, overwrite>(stream, kernel_args);
    if (C <= ShortRows::max_columns)
        return launch_blocks<T, ShortRows, overwrite>(stream, kernel_args);
    if (C <= LongRows::max_columns)
        return launch_blocks<T, LongRows, overwrite>(stream, kernel_args);
    return launch_clusters<T, overwrite>(stream, kernel_args);
}

}  // namespace

void norm_backward(Stream& stream, const NormBackward& args) {
    const int64_t M = args.x.rows(), C = args.x.cols();
    float* partials = stream.scratch_for<float>(norm_scratch_bytes(M, C));
    const int blocks = with_element_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        const BackwardArgs<T> kernel_args{
            .dres = static_cast<T*>(args.dres.data),
            .dy = static_cast<const T*>(args.dy.data),
            .x = static_cast<const T*>(args.x.data),
            .w = static_cast<const T*>(args.w.data),
            .stats = args.stats.as<float>(),
            .partials = partials,
            .M = M,
            .C = static_cast<int>(C),
            .rms = args.norm == Norm::rms,
            .writes_sums = {bool(args.dw), bool(args.db), bool(args.dbias)}};
        return args.overwrite_dres ? backward<T, true>(stream, args, kernel_args)
                                   : backward<T, false>(stream, args, kernel_args);
    });
    CUDA_CHECK_LAUNCH();
    const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(C, warp_size)), 3);
    reduce_partials<<<grid, dim3(warp_size, reduce_slices), 0, stream_of(stream)>>>(
        Sinks{{args.dw, args.db, args.dbias}}, partials, blocks, static_cast<int>(C));
    CUDA_CHECK_LAUNCH();
}

size_t norm_scratch_bytes(int64_t M, int64_t C) {
    return static_cast<size_t>(std::min<int64_t>(M, max_backward_blocks(C)) * 3 * C) *
           sizeof(float);
}

}  // namespace train_gpt::cuda
