// The head's loss. The matrix products go through linear.h; this file has softmax and cross-entropy
// over rows of logits, each as long as the vocabulary. In training, a row that fits into shared
// memory is read from memory once and written once.
#include <algorithm>
#include <climits>
#include <cstdint>

#include <cuda_pipeline.h>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/head_loss.h"
#include "kernels/linear/linear.h"

namespace train_gpt::cuda {

namespace {

constexpr int32_t ignored_target = -1;
constexpr float infinity = __builtin_huge_valf();

// Blocks of 512 threads, one row each. A row of 50257 bf16 logits takes 99 KiB of shared memory, so
// two blocks share a multiprocessor of an H200: one copies its row in, or writes, while the other
// computes. All copies of a block are in flight at the same time, far more than the 30 KiB per
// multiprocessor that keep the memory busy.
constexpr int row_threads = 512;
constexpr int row_warps = row_threads / warp_size;
static_assert(row_threads % warp_size == 0);

/// e^x with a relative error of 2⁻²²·max(1, |x|); results below 2⁻¹²⁶ become 0. One multiplication
/// and one MUFU.EX2. The error matters little, since x <= 0 here and e^x is small where |x| is
/// large.
__device__ __forceinline__ float exp_below(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
    return result;
}

/// Maximum over the block, the same in every thread; NaNs are ignored. `shared` as in block_sum.
__device__ __forceinline__ float block_max(float value, float* shared) {
    value = warp_max(value);
    if (threadIdx.x % warp_size == 0) shared[threadIdx.x / warp_size] = value;
    __syncthreads();
    float largest = shared[0];
#pragma unroll
    for (int warp = 1; warp < row_warps; ++warp) largest = fmaxf(largest, shared[warp]);
    return largest;
}

/// A row of logits as a sequence of packs. The last pack may end in padding, which starts at column
/// `columns`. Rows of a padded vocabulary begin at multiples of 16 bytes. If a row does not, its
/// packs are moved element by element, and each thread still gets the same ones: the sums do not
/// depend on the address.
template <class T>
struct Row {
    static constexpr int size = Pack<T>::size;
    T* data;
    int columns, padded, packs;
    bool aligned;

    __device__ Row(T* logits, int columns_, int padded_)
        : data(logits + int64_t{blockIdx.x} * padded_),
          columns(columns_),
          padded(padded_),
          packs((columns_ + size - 1) / size),
          aligned(reinterpret_cast<uintptr_t>(data) % 16 == 0) {}

    __device__ __forceinline__ bool is_whole(int pack) const {
        return aligned && (pack + 1) * size <= columns;
    }

    /// Elements past the last column are −∞.
    __device__ __forceinline__ Pack<T> load(int pack) const {
        return pack < packs && is_whole(pack) ? Pack<T>::load(data + pack * size)
                                              : load_elements(pack);
    }
    __device__ Pack<T> load_elements(int pack) const {
        Pack<T> result;
#pragma unroll
        for (int e = 0; e < size; ++e) {
            const int column = pack * size + e;
            result[e] = column < columns ? data[column] : from_float<T>(-infinity);
        }
        return result;
    }
    /// Padding columns become 0.
    __device__ __forceinline__ void store(int pack, const Pack<T>& values) const {
        if (is_whole(pack)) {
            values.store(data + pack * size);
            return;
        }
#pragma unroll
        for (int e = 0; e < size; ++e) {
            const int column = pack * size + e;
            if (column < padded) data[column] = column < columns ? values[e] : from_float<T>(0.0f);
        }
    }
    /// Clears the padding after the last pack.
    __device__ void clear_padding() const {
        for (int column = packs * size + static_cast<int>(threadIdx.x); column < padded;
             column += row_threads)
            data[column] = from_float<T>(0.0f);
    }
    __device__ void clear() const {
        Pack<T> zero;
#pragma unroll
        for (int e = 0; e < size; ++e) zero[e] = from_float<T>(0.0f);
        for (int pack = threadIdx.x; pack < packs; pack += row_threads) store(pack, zero);
        clear_padding();
    }
};

template <class T>
__device__ __forceinline__ float max_of(const Pack<T>& logits, float max) {
#pragma unroll
    for (int e = 0; e < Pack<T>::size; ++e) max = fmaxf(max, to_float(logits[e]));
    return max;
}

/// sum + Σ exp(z − max)
template <class T>
__device__ __forceinline__ float sum_of(const Pack<T>& logits, float max, float sum) {
#pragma unroll
    for (int e = 0; e < Pack<T>::size; ++e) sum += exp_below(to_float(logits[e]) - max);
    return sum;
}

template <class T>
__device__ __forceinline__ Pack<T> softmax_of(const Pack<T>& logits, float max, float scale) {
    Pack<T> result;
#pragma unroll
    for (int e = 0; e < Pack<T>::size; ++e)
        result[e] = from_float<T>(exp_below(to_float(logits[e]) - max) * scale);
    return result;
}

/// Writes dz of a row: softmax, then the target's column if the row has it. The thread that wrote
/// the pack with this column overwrites the column, so no barrier is needed. pack_at(i) is pack i
/// of the logits.
template <class T, class PackAt>
__device__ __forceinline__ void write_gradient(const Row<T>& row, float max, float sum,
                                               int64_t target, float target_logit,
                                               PackAt&& pack_at) {
    const float scale = 1.0f / sum;
    for (int pack = threadIdx.x; pack < row.packs; pack += row_threads)
        row.store(pack, softmax_of(pack_at(pack), max, scale));
    if (target >= 0 && target < row.columns && target / Row<T>::size % row_threads == threadIdx.x)
        row.data[target] = from_float<T>(exp_below(target_logit - max) * scale - 1.0f);
    row.clear_padding();
}

/// Losses of a chunk of rows and, if `backward`, dz in place of the logits [rows, Vp]. A block
/// takes one row and keeps it in `shared_packs` until its maximum and its sum are known. Each
/// thread works on packs that it copied itself.
template <class T>
__global__ void __launch_bounds__(row_threads, 2)
    loss_in_shared_memory(T* logits, int Vp, int V, const int32_t* targets, float* losses,
                          bool backward) {
    extern __shared__ uint4 shared_packs[];
    __shared__ float maxima[row_warps], sums[row_warps];
    const Row<T> row(logits, V, Vp);
    const int32_t target = targets[blockIdx.x];
    if (target == ignored_target) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        if (backward) row.clear();
        return;
    }
    T* const z = reinterpret_cast<T*>(shared_packs);
    for (int pack = threadIdx.x; pack < row.packs; pack += row_threads) {
        T* const to = z + pack * Row<T>::size;
        if (row.is_whole(pack))
            __pipeline_memcpy_async(to, row.data + pack * Row<T>::size, 16);
        else
            row.load_elements(pack).store(to);
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);

    const auto pack_at = [&](int pack) { return Pack<T>::load(z + pack * Row<T>::size); };
    float max = -infinity;
    for (int pack = threadIdx.x; pack < row.packs; pack += row_threads)
        max = max_of(pack_at(pack), max);
    max = block_max(max, maxima);
    const bool here = target >= 0 && target < V;
    const float target_logit = here ? to_float(z[target]) : -infinity;

    float sum = 0;
    for (int pack = threadIdx.x; pack < row.packs; pack += row_threads)
        sum = sum_of(pack_at(pack), max, sum);
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) + (max - target_logit);
    if (backward) write_gradient(row, max, sum, target, target_logit, pack_at);
}

/// Row statistics (max, Σ exp(z − max), z_target) over the first `columns` of logits [rows, Vp],
/// and the losses computed from them if `losses` is not null. Reads each row once: a thread keeps a
/// running maximum and rescales its sum when the maximum grows.
template <class T>
__global__ void __launch_bounds__(row_threads)
    row_statistics(float* stats, float* losses, T* logits, int Vp, int columns,
                   const int32_t* targets, int64_t first_column) {
    constexpr int packs_at_once = 4;  // 32 KiB in flight for each block
    __shared__ float maxima[row_warps], sums[row_warps];
    const Row<T> row(logits, columns, Vp);
    float max = -infinity, sum = 0;
    // base(−∞) is 0, so that exp(−∞ − base) is 0 even if only −∞ has been seen so far.
    const auto base = [](float of) { return of == -infinity ? 0.0f : of; };
    for (int from = threadIdx.x; from < row.packs; from += packs_at_once * row_threads) {
        Pack<T> packs[packs_at_once];
#pragma unroll
        for (int i = 0; i < packs_at_once; ++i) packs[i] = row.load(from + i * row_threads);
        const float max_before = max;
#pragma unroll
        for (int i = 0; i < packs_at_once; ++i) max = max_of(packs[i], max);
        sum *= exp_below(max_before - base(max));
#pragma unroll
        for (int i = 0; i < packs_at_once; ++i) sum = sum_of(packs[i], base(max), sum);
    }
    const float row_max = block_max(max, maxima);
    const float row_sum = block_sum(sum * exp_below(max - base(row_max)), sums);
    if (threadIdx.x != 0) return;
    const int32_t target = targets[blockIdx.x];
    const int64_t column = target - first_column;
    const bool here = target != ignored_target && column >= 0 && column < columns;
    const float target_logit = here ? to_float(row.data[column]) : -infinity;
    float* const out = stats + 3 * int64_t{blockIdx.x};
    out[0] = row_max;
    out[1] = row_sum;
    out[2] = target_logit;
    if (losses)
        losses[blockIdx.x] =
            target == ignored_target ? 0.0f : logf(row_sum) + (row_max - target_logit);
}

/// Statistics [rows, 3] over the whole vocabulary from those of its parts, [parts, rows, 3].
__global__ void __launch_bounds__(256)
    combine_statistics(float* stats, const float* of_parts, int64_t parts, int64_t rows) {
    const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const auto of = [&](int64_t part) { return of_parts + 3 * (part * rows + row); };
    float max = of(0)[0], sum = 0, target = of(0)[2];
    for (int64_t part = 1; part < parts; ++part) {
        max = fmaxf(max, of(part)[0]);
        target = fmaxf(target, of(part)[2]);
    }
    const float base = max == -infinity ? 0.0f : max;  // no NaN if all logits are −∞
    for (int64_t part = 0; part < parts; ++part) sum += of(part)[1] * exp_below(of(part)[0] - base);
    float* const out = stats + 3 * row;
    out[0] = max;
    out[1] = sum;
    out[2] = target;
}

/// losses[r] from statistics over the whole vocabulary.
__global__ void __launch_bounds__(256)
    losses_from(float* losses, const float* stats, const int32_t* targets, int64_t rows) {
    const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const float* const of_row = stats + 3 * row;
    losses[row] = targets[row] == ignored_target ? 0.0f : logf(of_row[1]) + (of_row[0] - of_row[2]);
}

/// dz in place of logits [rows, Vp], from row statistics over the whole vocabulary.
template <class T>
__global__ void __launch_bounds__(row_threads)
    row_gradient(T* logits, const float* stats, int Vp, int columns, const int32_t* targets,
                 int64_t first_column) {
    const Row<T> row(logits, columns, Vp);
    const int32_t target = targets[blockIdx.x];
    if (target == ignored_target) {
        row.clear();
        return;
    }
    const float* const of_row = stats + 3 * int64_t{blockIdx.x};
    write_gradient(row, of_row[0], of_row[1], target - first_column, of_row[2],
                   [&](int pack) { return row.load(pack); });
}

/// out [R, V] = logits [R, Vp] without the padding, in fp32. Blocks of (row, tile of columns).
constexpr int cast_threads = 256, cast_columns = 4 * cast_threads;
template <class T>
__global__ void __launch_bounds__(cast_threads)
    cast_rows(float* out, const T* logits, int64_t V, int64_t Vp) {
    const int64_t row = blockIdx.x, tile = int64_t{blockIdx.y} * cast_columns;
#pragma unroll
    for (int i = 0; i < cast_columns; i += cast_threads) {
        const int64_t column = tile + i + threadIdx.x;
        if (column < V) out[row * V + column] = to_float(logits[row * Vp + column]);
    }
}

/// total (+)= Σ losses[0..n). One block, so the order is always the same; tens of thousands of
/// numbers take microseconds.
constexpr int sum_threads = 1024;
__global__ void __launch_bounds__(sum_threads)
    sum_losses(double* total, const float* losses, int64_t n, bool accumulate) {
    __shared__ double sums[sum_threads / warp_size];
    double sum = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < n; i += sum_threads) sum += static_cast<double>(losses[i]);
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) *total = (accumulate ? *total : 0.0) + sum;
}

/// One block per source, so the order is always the same.
__global__ void __launch_bounds__(sum_threads) sum_losses_of_source(LossBySource args) {
    __shared__ double sums[sum_threads / warp_size];
    const int source = static_cast<int>(blockIdx.x);
    double sum = 0;
    for (int64_t b = 0; b < args.B; ++b) {
        if (args.source_of[b] != source) continue;
        for (int64_t t = threadIdx.x; t < args.T; t += sum_threads)
            sum += static_cast<double>(args.losses[b * args.T + t]);
    }
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) args.totals[source] = (args.accumulate ? args.totals[source] : 0.0) + sum;
}

unsigned blocks_for(const Tensor& logits) {
    assert(logits.rows() <= INT_MAX && logits.cols() <= INT_MAX);
    return static_cast<unsigned>(logits.rows());
}

void launch_statistics(Stream& stream, float* stats, float* losses, Tensor logits,
                       const int32_t* targets, int64_t first_column, int64_t columns) {
    with_element_type(logits.dtype, [&](auto type) {
        using T = decltype(type);
        row_statistics<T><<<blocks_for(logits), row_threads, 0, stream_of(stream)>>>(
            stats, losses, static_cast<T*>(logits.data), static_cast<int>(logits.cols()),
            static_cast<int>(columns), targets, first_column);
        CUDA_CHECK_LAUNCH();
    });
}

void launch_gradient(Stream& stream, Tensor logits, const float* stats, const int32_t* targets,
                     int64_t first_column, int64_t columns) {
    with_element_type(logits.dtype, [&](auto type) {
        using T = decltype(type);
        row_gradient<T><<<blocks_for(logits), row_threads, 0, stream_of(stream)>>>(
            static_cast<T*>(logits.data), stats, static_cast<int>(logits.cols()),
            static_cast<int>(columns), targets, first_column);
        CUDA_CHECK_LAUNCH();
    });
}

size_t shared_row_bytes(int64_t V, DType dtype) {
    return ceil_div<size_t>(static_cast<size_t>(V) * size_of(dtype), 16) * 16;
}

bool row_fits(const Stream& stream, int64_t V, DType dtype) {
    constexpr size_t reductions = 2 * row_warps * sizeof(float);
    return shared_row_bytes(V, dtype) + reductions <= limits_of(stream).shared_bytes_per_block;
}

size_t stats_bytes(int64_t rows) { return static_cast<size_t>(3 * rows) * sizeof(float); }

/// Losses of one chunk of rows and, if `backward`, dz in place of the logits. Which kernel runs
/// depends only on the vocabulary, the dtype and the GPU, so an evaluation gives the same bits as a
/// training step.
void chunk_loss(Stream& stream, Tensor logits, int64_t V, const int32_t* targets, float* losses,
                bool backward) {
    if (!row_fits(stream, V, logits.dtype)) {
        auto* stats = stream.scratch_for<float>(stats_bytes(logits.rows()));
        launch_statistics(stream, stats, losses, logits, targets, 0, V);
        if (backward) launch_gradient(stream, logits, stats, targets, 0, V);
        return;
    }
    with_element_type(logits.dtype, [&](auto type) {
        using T = decltype(type);
        const size_t shared = shared_row_bytes(V, logits.dtype);
        CUDA_CHECK(cudaFuncSetAttribute(loss_in_shared_memory<T>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared)));
        CUDA_CHECK(cudaFuncSetAttribute(loss_in_shared_memory<T>,
                                        cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
        loss_in_shared_memory<T><<<blocks_for(logits), row_threads, shared, stream_of(stream)>>>(
            static_cast<T*>(logits.data), static_cast<int>(logits.cols()), static_cast<int>(V),
            targets, losses, backward);
        CUDA_CHECK_LAUNCH();
    });
}

/// The same for a part of the vocabulary; `first` is the chunk's first row.
void chunk_loss_of_part(Stream& stream, const HeadLoss& args, int64_t first, Tensor logits) {
    const Tensor stats = args.stats.row_range(0, logits.rows());
    const int32_t* targets = args.targets + first;
    auto* const of_rows = static_cast<float*>(stats.data);
    launch_statistics(stream, of_rows, nullptr, logits, targets, args.first_column, args.V);
    args.combine(stream, stats);
    cuda::losses_of_stats(stream, args.losses + first, stats, targets);
    if (args.dx) launch_gradient(stream, logits, of_rows, targets, args.first_column, args.V);
}

}  // namespace

void head_loss(Stream& stream, const HeadLoss& args) {
    const int64_t R = args.x.rows(), chunk = args.logits.rows();
    GradientSink dw = args.dw;
    for (int64_t first = 0; first < R; first += chunk) {
        const int64_t rows = std::min(chunk, R - first);
        const Tensor x = args.x.row_range(first, rows), logits = args.logits.row_range(0, rows);
        cuda::linear_forward(stream, {.out = logits, .x = x, .w = args.w});
        if (args.combine)
            chunk_loss_of_part(stream, args, first, logits);
        else
            chunk_loss(stream, logits, args.V, args.targets + first, args.losses + first,
                       static_cast<bool>(args.dx));
        if (!args.dx) continue;
        cuda::linear_backward_input(
            stream, {.dx = args.dx.row_range(first, rows), .dy = logits, .w = args.w});
        if (!dw) continue;
        cuda::linear_backward_weight(stream, {.dw = dw, .x = x, .dy = logits});
        dw.accumulate = true;
    }
}

void head_logits(Stream& stream, Tensor out, Tensor x, Tensor w, Tensor scratch_logits) {
    const int64_t R = x.rows(), V = out.cols(), Vp = w.rows();
    const Tensor logits = scratch_logits.row_range(0, R);
    cuda::linear_forward(stream, {.out = logits, .x = x, .w = w});
    with_element_type(logits.dtype, [&](auto type) {
        using T = decltype(type);
        const dim3 blocks(static_cast<unsigned>(R),
                          static_cast<unsigned>(ceil_div<int64_t>(V, cast_columns)));
        cast_rows<T><<<blocks, cast_threads, 0, stream_of(stream)>>>(
            static_cast<float*>(out.data), static_cast<const T*>(logits.data), V, Vp);
        CUDA_CHECK_LAUNCH();
    });
}

void softmax_stats(Stream& stream, Tensor stats, Tensor logits, const int32_t* targets,
                   int64_t first_column, int64_t columns) {
    launch_statistics(stream, stats.as<float>(), nullptr, logits, targets, first_column, columns);
}

void combine_softmax_stats(Stream& stream, Tensor stats, Tensor of_parts) {
    const int64_t rows = stats.rows();
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(rows, 256));
    combine_statistics<<<blocks, 256, 0, stream_of(stream)>>>(
        stats.as<float>(), of_parts.as<float>(), of_parts.shape[0], rows);
    CUDA_CHECK_LAUNCH();
}

void losses_of_stats(Stream& stream, float* losses, Tensor stats, const int32_t* targets) {
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(stats.rows(), 256));
    losses_from<<<blocks, 256, 0, stream_of(stream)>>>(losses, stats.as<float>(), targets,
                                                       stats.rows());
    CUDA_CHECK_LAUNCH();
}

void softmax_backward(Stream& stream, Tensor logits, Tensor stats, const int32_t* targets,
                      int64_t first_column, int64_t columns) {
    launch_gradient(stream, logits, stats.as<float>(), targets, first_column, columns);
}

void accumulate_loss(Stream& stream, double* total, const float* losses, int64_t n,
                     bool accumulate) {
    sum_losses<<<1, sum_threads, 0, stream_of(stream)>>>(total, losses, n, accumulate);
    CUDA_CHECK_LAUNCH();
}

void accumulate_loss_by_source(Stream& stream, const LossBySource& args) {
    sum_losses_of_source<<<static_cast<unsigned>(args.sources), sum_threads, 0,
                           stream_of(stream)>>>(args);
    CUDA_CHECK_LAUNCH();
}

size_t head_loss_scratch_bytes(DType dtype, int64_t chunk, int64_t Vp, int64_t C) {
    return std::max(cuda::linear_scratch_bytes(dtype, chunk, Vp, C), stats_bytes(chunk));
}

}  // namespace train_gpt::cuda
