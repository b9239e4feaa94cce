#include <algorithm>
#include <type_traits>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/norm.h"

namespace train_gpt::cuda {

namespace {

// Both passes are memory-bound: they read each row once, in 16-byte packs, and keep it in
// registers. Rows that do not consist of whole packs (C not a multiple of the pack size, or a view
// that starts at any address) or that are too long for registers use the *_any kernels, which visit
// a row several times and rely on the caches.

/// Forward: a row belongs to one warp with up to 8 packs per lane (C <= 2048 in bf16), else to a
/// block with up to 4 packs per thread (C <= 32768). Eight warps per block keep 100 KB or more of
/// loads in flight on a multiprocessor.
constexpr int warp_packs = 8, block_packs = 4, max_block_threads = 1024, rows_per_block = 8;

/// Backward: each thread holds three fp32 column sums per element of its part of a row. With 8
/// elements per thread, 80 registers are enough, and two blocks of 384 threads run on a
/// multiprocessor; rows of more than 3072 elements take 16 elements and 128 registers per thread.
/// Incoming rows are staged in shared memory: while one is processed, `stages` − 1 are being read.
/// A block processes several rows side by side, which keeps the number of partial sums small.
struct ShortRows {
    static constexpr int elements = 8, stages = 3, max_threads = 384, blocks_per_multiprocessor = 2;
    static constexpr int max_columns = elements * max_threads;
};
struct LongRows {
    static constexpr int elements = 16, stages = 2, max_threads = 512,
                         blocks_per_multiprocessor = 1;
    static constexpr int max_columns = elements * max_threads;
};

constexpr int any_threads = 256;

/// The maximum number of blocks that sum columns, which bounds the scratch memory. 512 allow three
/// blocks on each of 160 multiprocessors.
int max_backward_blocks(int64_t C) { return C <= 2048 ? 512 : 256; }

/// Calls f(std::integral_constant<int, n>{}) for 1 <= n <= most.
template <int most, class F>
void with_count(int64_t n, F&& f) {
    if constexpr (most > 1) {
        if (n < most) return with_count<most - 1>(n, f);
    }
    f(std::integral_constant<int, most>{});
}

template <class T>
struct ForwardArgs {
    T* out;
    float* stats;              // may be null
    const T *x, *w, *b;        // b may be null
    const T *residual, *bias;  // of the adding form; bias may be null
    T* x_out;                  // null: nothing is added
    int64_t M;
    int C;
    float epsilon;
    bool rms;

    __device__ void store_stats(int64_t row, float mean, float rstd) const {
        if (!stats) return;
        stats[2 * row] = mean;
        stats[2 * row + 1] = rstd;
    }
};

/// x += residual + bias for a pack of a row that begins at element `first`; stores the sum, and
/// leaves in x what was stored.
template <class T>
__device__ __forceinline__ void add_to_row(float (&x)[Pack<T>::size], const ForwardArgs<T>& args,
                                           int64_t first, int column) {
    constexpr int size = Pack<T>::size;
    float residual[size], bias[size] = {};
    unpack(residual, Pack<T>::load(args.residual + first + column));
    if (args.bias) unpack(bias, Pack<T>::load(args.bias + column));
#pragma unroll
    for (int i = 0; i < size; ++i) x[i] = x[i] + residual[i] + bias[i];
    const Pack<T> sum = pack<T>(x);
    sum.store(args.x_out + first + column);
    unpack(x, sum);
}

/// One row per warp (one_warp) or per block; C <= threads · packs · pack size. Reads x once, writes
/// out and stats.
template <class T, int packs, bool one_warp>
__global__ void __launch_bounds__(one_warp ? rows_per_block* warp_size : max_block_threads)
    forward_rows(ForwardArgs<T> args) {
    __shared__ float shared[2][max_block_threads / warp_size];
    constexpr int size = Pack<T>::size;
    const int lanes = one_warp ? warp_size : static_cast<int>(blockDim.x),
              lane = static_cast<int>(threadIdx.x) % lanes;
    const int64_t row =
        one_warp ? int64_t{blockIdx.x} * rows_per_block + threadIdx.x / warp_size : blockIdx.x;
    if (row >= args.M) return;
    const auto column = [&](int pack) { return (pack * lanes + lane) * size; };
    const auto row_sum = [&](float value, float* partials) {
        return one_warp ? warp_sum(value) : block_sum(value, partials);
    };

    Pack<T> row_packs[packs];
#pragma unroll
    for (int k = 0; k < packs; ++k)
        if (column(k) < args.C) row_packs[k] = Pack<T>::load(args.x + row * args.C + column(k));

    float x[packs][size], sum = 0, squares = 0;
#pragma unroll
    for (int k = 0; k < packs; ++k) {
        if (column(k) >= args.C) continue;
        unpack(x[k], row_packs[k]);
        if (args.x_out) add_to_row(x[k], args, row * args.C, column(k));
#pragma unroll
        for (int i = 0; i < size; ++i) sum += x[k][i];
    }
    const float mean = args.rms ? 0.0f : row_sum(sum, shared[0]) / static_cast<float>(args.C);
#pragma unroll
    for (int k = 0; k < packs; ++k) {
        if (column(k) >= args.C) continue;
#pragma unroll
        for (int i = 0; i < size; ++i) {
            x[k][i] -= mean;
            squares += x[k][i] * x[k][i];
        }
    }
    const float rstd =
        rsqrtf(row_sum(squares, shared[1]) / static_cast<float>(args.C) + args.epsilon);
    if (lane == 0) args.store_stats(row, mean, rstd);

#pragma unroll
    for (int k = 0; k < packs; ++k) {
        if (column(k) >= args.C) continue;
        float w[size], b[size] = {};
        unpack(w, Pack<T>::load(args.w + column(k)));
        if (args.b) unpack(b, Pack<T>::load(args.b + column(k)));
#pragma unroll
        for (int i = 0; i < size; ++i) x[k][i] = x[k][i] * rstd * w[i] + b[i];
        pack<T>(x[k]).store(args.out + row * args.C + column(k));
    }
}

/// One row per block, any C and alignment; x is read three times.
template <class T>
__global__ void __launch_bounds__(any_threads) forward_any(ForwardArgs<T> args) {
    __shared__ float shared[2][any_threads / warp_size];
    const int64_t row = blockIdx.x;
    const T* x = args.x + row * args.C;
    float sum = 0, squares = 0;
    if (args.x_out) {  // each thread reads below what it has written here
        T* x_out = args.x_out + row * args.C;
        for (int c = static_cast<int>(threadIdx.x); c < args.C; c += any_threads)
            x_out[c] = from_float<T>(to_float(x[c]) + to_float(args.residual[row * args.C + c]) +
                                     (args.bias ? to_float(args.bias[c]) : 0.0f));
        x = x_out;
    }
    for (int c = static_cast<int>(threadIdx.x); c < args.C; c += any_threads) sum += to_float(x[c]);
    const float mean = args.rms ? 0.0f : block_sum(sum, shared[0]) / static_cast<float>(args.C);
    for (int c = static_cast<int>(threadIdx.x); c < args.C; c += any_threads) {
        const float centred = to_float(x[c]) - mean;
        squares += centred * centred;
    }
    const float rstd =
        rsqrtf(block_sum(squares, shared[1]) / static_cast<float>(args.C) + args.epsilon);
    if (threadIdx.x == 0) args.store_stats(row, mean, rstd);
    for (int c = static_cast<int>(threadIdx.x); c < args.C; c += any_threads)
        args.out[row * args.C + c] =
            from_float<T>((to_float(x[c]) - mean) * rstd * to_float(args.w[c]) +
                          (args.b ? to_float(args.b[c]) : 0.0f));
}

template <class T>
struct BackwardArgs {
    T* dres;
    const T *dy, *x, *w;
    const float* stats;
    float* partials;  // [blocks, 3, C]: each block's column sums for dw, db and dbias
    int64_t M;
    int C;
    bool rms;
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

/// Sums pairs over the warps of a row: sums[2i] and sums[2i + 1] come from warp i of up to 16.
__device__ __forceinline__ float2 sum_of_pairs(const float* sums, int warps) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    float own = lane < 2 * warps ? sums[lane] : 0.0f;
#pragma unroll
    for (int distance = 2; distance < warp_size; distance *= 2)
        own += __shfl_xor_sync(0xffffffffu, own, distance);
    const float other = __shfl_xor_sync(0xffffffffu, own, 1);
    return lane % 2 == 0 ? float2{own, other} : float2{other, own};
}

/// A barrier for the threads of one row, which are whole warps.
__device__ __forceinline__ void row_barrier() {
    if (blockDim.x == warp_size)
        __syncwarp();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
}

/// The totals of two values over the threads of a row; `sums`: the row's shared memory, two floats
/// per warp.
__device__ __forceinline__ float2 row_total_of_pairs(float* sums, float a, float b) {
    const int lane = static_cast<int>(threadIdx.x);
    const float pair = warp_sum_pair(a, b);
    if (lane % 16 == 0) sums[lane / 16] = pair;
    row_barrier();
    return sum_of_pairs(sums, static_cast<int>(blockDim.x) / warp_size);
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
/// blockDim.x-th one.
template <class T, class Shape>
struct RowPart {
    static constexpr int size = Pack<T>::size, packs = Shape::elements / size;
    static_assert(Shape::elements % size == 0);

    using Values = float[packs][size];

    static __device__ __forceinline__ int column(int pack) {
        return (pack * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * size;
    }
};

/// Rows of dy, x and dres on their way through dynamic shared memory,
/// Pack<T>[blockDim.y][stages][3][packs][blockDim.x]. A thread reads only what it copied itself.
template <class T, class Shape, bool overwrite>
class StagedRows : RowPart<T, Shape> {
  public:
    using RowPart<T, Shape>::packs, RowPart<T, Shape>::size, RowPart<T, Shape>::column;

    __device__ __forceinline__ StagedRows(uint4* shared, int group)
        : staged_(reinterpret_cast<Pack<T>*>(shared) + group * Shape::stages * stage_packs() +
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
        asm volatile("cp.async.wait_group %0;" ::"n"(Shape::stages - 1) : "memory");
    }
    /// The current row: element (kind·packs + k)·blockDim.x is pack k of dy, x or dres (`kind` 0, 1,
    /// 2).
    __device__ __forceinline__ const Pack<T>* current() const { return staged_ + current_; }
    __device__ __forceinline__ void next_row() { advance(current_); }

  private:
    static __device__ __forceinline__ int lanes() { return static_cast<int>(blockDim.x); }
    static __device__ __forceinline__ int stage_packs() { return 3 * packs * lanes(); }
    static __device__ __forceinline__ void advance(int& stage) {
        stage = stage == (Shape::stages - 1) * stage_packs() ? 0 : stage + stage_packs();
    }

    Pack<T>* staged_;
    int current_ = 0, next_ = 0;  // where in a thread's memory these stages are
};

/// Adds up the column sums dw, db and dbias of the block's groups of threads, one group after the
/// other, in `block_sums` (shared memory, [3, C]); the last one writes the totals to the partials.
template <class T, class Shape>
__device__ __forceinline__ void write_column_sums(const BackwardArgs<T>& args, float* block_sums,
                                                  const typename RowPart<T, Shape>::Values& dw,
                                                  const typename RowPart<T, Shape>::Values& db,
                                                  const typename RowPart<T, Shape>::Values& dbias) {
    using Part = RowPart<T, Shape>;
    float* const partials = args.partials + int64_t{blockIdx.x} * 3 * args.C;
    const int group = static_cast<int>(threadIdx.y), last = static_cast<int>(blockDim.y) - 1;
    for (int turn = 0; turn <= last; ++turn) {
        if (last > 0) __syncthreads();
        if (group != turn) continue;
        const auto add = [&](int kind, const typename Part::Values& sums) {
#pragma unroll
            for (int k = 0; k < Part::packs; ++k) {
                if (Part::column(k) >= args.C) continue;
#pragma unroll
                for (int i = 0; i < Part::size; i += Pack<float>::size) {
                    const int place = kind * args.C + Part::column(k) + i;
                    Pack<float> sum = {};
                    if (turn > 0) sum = Pack<float>::load(block_sums + place);
#pragma unroll
                    for (int j = 0; j < Pack<float>::size; ++j) sum[j] += sums[k][i + j];
                    sum.store((turn < last ? block_sums : partials) + place);
                }
            }
        };
        add(0, dw);
        add(1, db);
        add(2, dbias);
    }
}

/// A block processes blockDim.y rows at a time, each with blockDim.x threads: whole warps with C <=
/// blockDim.x · elements. It takes every gridDim.x-th group of rows, reads dy, x and dres once,
/// writes dres and, at the end, its column sums. Dynamic shared memory: that of StagedRows.
template <class T, class Shape, bool overwrite>
__global__ void __launch_bounds__(Shape::max_threads, Shape::blocks_per_multiprocessor)
    backward_rows(BackwardArgs<T> args) {
    using Part = RowPart<T, Shape>;
    constexpr int size = Part::size, packs = Part::packs;
    __shared__ float warp_sums[2][2 * Shape::max_threads / warp_size];
    extern __shared__ uint4 dynamic_shared[];
    const int lanes = static_cast<int>(blockDim.x), group = static_cast<int>(threadIdx.y),
              warps = lanes / warp_size;

    const int64_t first_row = int64_t{blockIdx.x} * blockDim.y + group,
                  stride = int64_t{gridDim.x} * blockDim.y, stride_elements = stride * args.C;
    const int rows =
        first_row < args.M ? static_cast<int>(ceil_div(args.M - first_row, stride)) : 0;
    int64_t at = first_row * args.C + Part::column(0);  // the thread's first element of the row
    StagedRows<T, Shape, overwrite> staged(dynamic_shared, group);
#pragma unroll
    for (int i = 0; i + 1 < Shape::stages; ++i)
        staged.copy_next(args, at + i * stride_elements, i < rows);
    const float2* stats = reinterpret_cast<const float2*>(args.stats) + first_row;
    float2 next_stats = rows > 0 ? *stats : float2{};

    const float scale = 1.0f / static_cast<float>(args.C);
    typename Part::Values dw = {}, db = {}, dbias = {};
    for (int left = rows; left > 0; --left, at += stride_elements, staged.next_row()) {
        const auto [mean, rstd] = next_stats;
        stats += stride;
        if (left > 1) next_stats = *stats;
        staged.copy_next(args, at + (Shape::stages - 1) * stride_elements, left >= Shape::stages);
        // Read again for each row: w is in L1, and there are no registers to keep it in.
        Pack<T> w_packs[packs] = {};
#pragma unroll
        for (int k = 0; k < packs; ++k)
            if (Part::column(k) < args.C) w_packs[k] = Pack<T>::load(args.w + Part::column(k));
        staged.wait();
        const Pack<T>* const from = staged.current();

        typename Part::Values g, normal;
        float sum_g = 0, sum_gx = 0;
#pragma unroll
        for (int k = 0; k < packs; ++k) {
            float w[size], dy[size];
            unpack(w, w_packs[k]);
            unpack(dy, from[k * lanes]);
            unpack(normal[k], from[(packs + k) * lanes]);
#pragma unroll
            for (int i = 0; i < size; ++i) {
                normal[k][i] = (normal[k][i] - mean) * rstd;
                g[k][i] = dy[i] * w[i];
                sum_g += g[k][i];
                sum_gx += g[k][i] * normal[k][i];
                dw[k][i] += dy[i] * normal[k][i];
                db[k][i] += dy[i];
            }
        }
        // One barrier per row is enough, because the next row uses the other half of warp_sums.
        const float2 totals =
            row_total_of_pairs(warp_sums[left % 2] + group * 2 * warps, sum_g, sum_gx);
        const float mean_g = args.rms ? 0.0f : scale * totals.x, mean_gx = scale * totals.y;
#pragma unroll
        for (int k = 0; k < packs; ++k) {
            float dres[size];
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
    write_column_sums<T, Shape>(args, reinterpret_cast<float*>(dynamic_shared), dw, db, dbias);
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

/// Whether rows of C elements that begin at these addresses are made of whole packs.
template <class T, class... Tensors>
bool rows_are_packed(int64_t C, const Tensors&... tensors) {
    return C % Pack<T>::size == 0 &&
           ((reinterpret_cast<uintptr_t>(tensors.data) % sizeof(Pack<T>) == 0) && ...);
}

template <class T>
void forward(Stream& stream, const NormForward& args) {
    const int64_t M = args.x.rows(), C = args.x.cols(), packs = ceil_div<int64_t>(C, Pack<T>::size);
    const ForwardArgs<T> kernel_args{.out = static_cast<T*>(args.out.data),
                                     .stats = static_cast<float*>(args.stats.data),
                                     .x = static_cast<const T*>(args.x.data),
                                     .w = static_cast<const T*>(args.w.data),
                                     .b = static_cast<const T*>(args.b.data),
                                     .residual = static_cast<const T*>(args.residual.data),
                                     .bias = static_cast<const T*>(args.bias.data),
                                     .x_out = static_cast<T*>(args.x_out.data),
                                     .M = M,
                                     .C = static_cast<int>(C),
                                     .epsilon = args.epsilon,
                                     .rms = args.norm == Norm::rms};
    if (!rows_are_packed<T>(C, args.x, args.out, args.w, args.b, args.residual, args.bias,
                            args.x_out) ||
        packs > block_packs * max_block_threads) {
        forward_any<T>
            <<<static_cast<unsigned>(M), any_threads, 0, stream_of(stream)>>>(kernel_args);
    } else if (packs <= warp_packs * warp_size) {
        with_count<warp_packs>(ceil_div<int64_t>(packs, warp_size), [&](auto per_lane) {
            forward_rows<T, per_lane.value, true>
                <<<static_cast<unsigned>(ceil_div<int64_t>(M, rows_per_block)),
                   rows_per_block * warp_size, 0, stream_of(stream)>>>(kernel_args);
        });
    } else {
        const int64_t threads = ceil_div<int64_t>(packs, block_packs * warp_size) * warp_size;
        forward_rows<T, block_packs, false>
            <<<static_cast<unsigned>(M), static_cast<unsigned>(threads), 0, stream_of(stream)>>>(
                kernel_args);
    }
    CUDA_CHECK_LAUNCH();
}

/// The launch configuration of backward_rows for rows of C elements. A multiprocessor runs
/// `resident` blocks.
struct BackwardLaunch {
    int64_t threads, groups, resident;
    size_t shared_bytes;
};

template <class T, class Shape>
BackwardLaunch backward_launch(int64_t M, int64_t C) {
    constexpr int packs = Shape::elements / Pack<T>::size;
    const int64_t threads = ceil_div<int64_t>(C, Shape::elements * warp_size) * warp_size;
    const int64_t groups = std::clamp<int64_t>(Shape::max_threads / threads, 1, M);
    return {threads, groups,
            Shape::max_threads * Shape::blocks_per_multiprocessor / (threads * groups),
            static_cast<size_t>(groups * Shape::stages * 3 * packs * threads) * sizeof(Pack<T>)};
}

/// Launches the kernel that writes dres and the partials; returns the number of blocks that wrote
/// partials. This number, and with it the order of the sums, depends on the number of
/// multiprocessors.
template <class T, bool overwrite>
int backward(Stream& stream, const NormBackward& args, const BackwardArgs<T>& kernel_args) {
    const int64_t M = kernel_args.M, C = kernel_args.C;
    const DeviceLimits& limits = limits_of(stream);
    const bool packed = rows_are_packed<T>(C, args.dy, args.x, args.dres, args.w) &&
                        reinterpret_cast<uintptr_t>(args.stats.data) % sizeof(float2) == 0;
    const bool is_short = C <= ShortRows::max_columns;
    const BackwardLaunch launch =
        is_short ? backward_launch<T, ShortRows>(M, C) : backward_launch<T, LongRows>(M, C);
    constexpr size_t static_shared_bytes = 1024;  // upper bound; warp_sums
    if (!packed || C > LongRows::max_columns ||
        launch.shared_bytes + static_shared_bytes > limits.shared_bytes_per_block) {
        const int64_t blocks =
            std::min<int64_t>({M, limits.multiprocessors, max_backward_blocks(C)});
        backward_any<T, overwrite>
            <<<static_cast<unsigned>(blocks), any_threads, 0, stream_of(stream)>>>(kernel_args);
        CUDA_CHECK_LAUNCH();
        return static_cast<int>(blocks);
    }
    const int64_t blocks =
        std::min<int64_t>({ceil_div(M, launch.groups), limits.multiprocessors * launch.resident,
                           max_backward_blocks(C)});
    const auto kernel =
        is_short ? backward_rows<T, ShortRows, overwrite> : backward_rows<T, LongRows, overwrite>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(launch.shared_bytes)));
    const dim3 block(static_cast<unsigned>(launch.threads), static_cast<unsigned>(launch.groups));
    kernel<<<static_cast<unsigned>(blocks), block, launch.shared_bytes, stream_of(stream)>>>(
        kernel_args);
    CUDA_CHECK_LAUNCH();
    return static_cast<int>(blocks);
}

}  // namespace

void norm_forward(Stream& stream, const NormForward& args) {
    assert(args.x.dtype == args.out.dtype && args.out.data != args.x.data);
    with_element_type(args.x.dtype, [&](auto type) { forward<decltype(type)>(stream, args); });
}

void norm_backward(Stream& stream, const NormBackward& args) {
    const int64_t M = args.x.rows(), C = args.x.cols();
    float* partials = stream.scratch_for<float>(norm_scratch_bytes(M, C));
    const int blocks = with_element_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        const BackwardArgs<T> kernel_args{.dres = static_cast<T*>(args.dres.data),
                                          .dy = static_cast<const T*>(args.dy.data),
                                          .x = static_cast<const T*>(args.x.data),
                                          .w = static_cast<const T*>(args.w.data),
                                          .stats = args.stats.as<float>(),
                                          .partials = partials,
                                          .M = M,
                                          .C = static_cast<int>(C),
                                          .rms = args.norm == Norm::rms};
        return args.overwrite_dres ? backward<T, true>(stream, args, kernel_args)
                                   : backward<T, false>(stream, args, kernel_args);
    });
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
