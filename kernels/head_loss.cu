// The head's loss. The matrix products go through linear.h; this file has softmax and cross-entropy
// over rows of logits, each as long as the vocabulary. In training, a row that fits into the shared
// memory of a block, or of a cluster of blocks, is read from memory once and written once.
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cstdint>

#include <cuda_pipeline.h>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/cuda_cluster.cuh"
#include "kernels/head_loss.h"
#include "kernels/linear/linear.h"
#include "kernels/softcap_math.cuh"

namespace train_gpt::cuda {

namespace {

constexpr int32_t ignored_target = -1;
constexpr float infinity = __builtin_huge_valf();

// Blocks of 512 threads, one row each. A row of 50257 bf16 logits takes 99 KiB of shared memory, so
// two blocks share a multiprocessor of an H200: one copies its row in, or writes, while the other
// computes. All copies of a block are in flight at the same time, far more than the 30 KiB per
// multiprocessor that keep the memory busy. A row that does not fit into a block's shared memory,
// such as one of 128256 bf16 logits (250 KiB), is shared by the fewest blocks of which two run on a
// multiprocessor: 4 with 63 KiB each.
constexpr int row_threads = 512;
constexpr int row_warps = row_threads / warp_size;
static_assert(row_threads % warp_size == 0);

constexpr float log2_e = 1.44269504f;

/// 2^x by one MUFU.EX2, with a relative error of 2⁻²²; results below 2⁻¹²⁶ become 0.
__device__ __forceinline__ float exp2_of(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/// Exponentials of logits z <= max without their common factor: e^(z − max) = at(z) / at(max).
/// at(max) is close to 1.
template <class T>
struct Powers {
    float base;  // finite also if only −∞ has been seen, so that the power of −∞ is 0

    __device__ explicit Powers(float max) : base(fmaxf(max, -FLT_MAX)) {}
    __device__ __forceinline__ float at(float z) const { return exp2_of((z - base) * log2_e); }
    /// The factor that turns these powers into those of a larger maximum.
    __device__ __forceinline__ float to(const Powers& larger) const { return larger.at(base); }
};

/// In bf16, at(z) = 2^(z·log2 e − base) takes one fused multiply-add; the error of the rounded base
/// is common to all z. For |max| >= 2¹⁵, the next smaller bf16 number is at least 128 below max, so
/// that with any factor near log2 e smaller logits give 0. With 1.5, all products are exact, and
/// at(max) = 1. A larger max always has a larger base. Beyond |max| = 2¹²⁷ the base overflows, and
/// the sum is no number, as for infinite logits.
template <>
struct Powers<__nv_bfloat16> {
    float factor, base;

    __device__ explicit Powers(float max)
        : factor(fabsf(max) < 32768.0f ? log2_e : 1.5f), base(fmaxf(max * factor, -FLT_MAX)) {}
    __device__ __forceinline__ float at(float z) const { return exp2_of(fmaf(z, factor, -base)); }
    __device__ __forceinline__ float to(const Powers& larger) const {
        return exp2_of(base - larger.base);
    }
};

/// The largest element seen; NaNs are ignored.
template <class T>
struct Largest {
    float value = -infinity;

    __device__ __forceinline__ void add(const Pack<T>& elements) {
#pragma unroll
        for (int e = 0; e < Pack<T>::size; ++e) value = fmaxf(value, elements[e]);
    }
    __device__ __forceinline__ float get() const { return value; }
};
template <>
struct Largest<__nv_bfloat16> {
    __nv_bfloat162 pair = __floats2bfloat162_rn(-infinity, -infinity);

    __device__ __forceinline__ void add(const Pack<__nv_bfloat16>& elements) {
        __nv_bfloat162 pairs[4];
        __builtin_memcpy(pairs, &elements, sizeof pairs);
#pragma unroll
        for (int i = 0; i < 4; ++i) pair = __hmax2(pair, pairs[i]);
    }
    __device__ __forceinline__ float get() const {
        return fmaxf(__low2float(pair), __high2float(pair));
    }
};

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

/// A row of logits as a sequence of packs; thread t works on packs t, t + row_threads, … The last
/// pack may end in padding, which starts at column `columns`. The first `whole` packs are moved by
/// one instruction each, the others element by element. If a row does not begin at a multiple of 16
/// bytes, as those of a padded vocabulary do, no pack is whole; each thread still gets the same
/// ones, and the sums do not depend on the address.
template <class T>
struct Row {
    static constexpr int size = Pack<T>::size;
    T* data;
    int columns, padded, packs, whole;

    __device__ Row(T* data_, int columns_, int padded_)
        : data(data_),
          columns(columns_),
          padded(padded_),
          packs((columns_ + size - 1) / size),
          whole(reinterpret_cast<uintptr_t>(data) % 16 == 0 ? columns_ / size : 0) {}

    /// The columns that begin with `first`, `count` at most, which is a multiple of a pack's size.
    /// The padding belongs to the last part.
    __device__ Row part(int first, int count) const {
        const bool is_last = columns - first <= count;
        const int has = is_last ? max(columns - first, 0) : count;
        return {data + min(first, columns), has, is_last ? has + padded - columns : has};
    }

    /// The first pack of this thread that is not whole.
    __device__ int first_not_whole() const {
        return whole + static_cast<int>((threadIdx.x - static_cast<unsigned>(whole)) % row_threads);
    }
    /// Elements past the last column are −∞.
    __device__ __forceinline__ Pack<T> load(int pack) const {
        return pack < whole ? Pack<T>::load(data + pack * size) : load_elements(pack);
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
    /// Writes pack_at(i) to each pack i of this thread. Padding columns become 0.
    template <class PackAt>
    __device__ __forceinline__ void fill(PackAt&& pack_at) const {
        int pack = static_cast<int>(threadIdx.x);
#pragma unroll 4
        for (; pack < whole; pack += row_threads) pack_at(pack).store(data + pack * size);
#pragma unroll 1
        for (; pack < packs; pack += row_threads) store_elements(pack, pack_at(pack));
        for (int column = packs * size + static_cast<int>(threadIdx.x); column < padded;
             column += row_threads)
            data[column] = from_float<T>(0.0f);
    }
    __device__ void clear() const {
        Pack<T> zero;
#pragma unroll
        for (int e = 0; e < size; ++e) zero[e] = from_float<T>(0.0f);
        fill([&](int) { return zero; });
    }

  private:
    __device__ void store_elements(int pack, const Pack<T>& values) const {
#pragma unroll
        for (int e = 0; e < size; ++e) {
            const int column = pack * size + e;
            if (column < padded) data[column] = column < columns ? values[e] : from_float<T>(0.0f);
        }
    }
};

/// A thread processes groups of packs, 32 KiB for each block. A row in shared memory has at most
/// max_groups groups; __pipeline_wait_prior() counts no further.
constexpr int group_packs = 4, max_groups = 8;
constexpr size_t max_shared_row_bytes = size_t{16} * group_packs * max_groups * row_threads;

/// The largest capped logit of a row and the sum of the powers relative to it.
template <class T>
struct RowSum {
    float max, sum;
    Powers<T> powers;

    /// Σ exp(z − max); 0 if all logits are −∞
    __device__ float of_exponentials() const {
        return max == -infinity ? sum : sum / powers.at(max);
    }
};

/// A thread's part of a RowSum, with a running maximum: each add() rescales the sum before it.
template <class T, class Cap>
struct PartialSum {
    Cap cap;
    Largest<T> largest = {};  // of the logits as they are: a cap does not change their order
    Powers<T> powers{-infinity};
    float sum = 0;

    template <int n>
    __device__ __forceinline__ void add(const Pack<T> (&packs)[n]) {
#pragma unroll
        for (int i = 0; i < n; ++i) largest.add(packs[i]);
        const Powers<T> now(cap(largest.get()));
        float of_packs = 0;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            float z[Pack<T>::size];
            unpack(z, packs[i]);
#pragma unroll
            for (int e = 0; e < Pack<T>::size; ++e) of_packs += now.at(cap(z[e]));
        }
        sum = sum * powers.to(now) + of_packs;
        powers = now;
    }
};

/// One number of each warp for a maximum, and one for a sum.
struct WarpNumbers {
    float maxima[row_warps], sums[row_warps];
};

/// Adds up a row in one pass. pack_at(i) is pack i of the row; wait_for_group() is called before
/// each group of packs, wait_for_all() before the packs after the last whole group. of_warps: in
/// shared memory.
template <class T, class Cap, class PackAt, class WaitForGroup, class WaitForAll>
__device__ __forceinline__ RowSum<T> sum_of_row(int packs, Cap cap, WarpNumbers& of_warps,
                                                PackAt&& pack_at, WaitForGroup&& wait_for_group,
                                                WaitForAll&& wait_for_all) {
    PartialSum<T, Cap> part{cap};
    int pack = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (; pack + (group_packs - 1) * row_threads < packs; pack += group_packs * row_threads) {
        wait_for_group();
        Pack<T> group[group_packs];
#pragma unroll
        for (int i = 0; i < group_packs; ++i) group[i] = pack_at(pack + i * row_threads);
        part.add(group);
    }
    wait_for_all();
#pragma unroll 1
    for (; pack < packs; pack += row_threads) {
        const Pack<T> one[] = {pack_at(pack)};
        part.add(one);
    }
    const float max = cap(block_max(part.largest.get(), of_warps.maxima));
    const Powers<T> powers(max);
    return {max, block_sum(part.sum * part.powers.to(powers), of_warps.sums), powers};
}

/// The factor of the softmax in dz, from the row's statistics.
__device__ __forceinline__ float softmax_factor(float max, float sum_of_exponentials,
                                                float z_loss) {
    return z_loss == 0 ? 1.0f : 1.0f + 2.0f * z_loss * (logf(sum_of_exponentials) + max);
}

/// What dz of a row is computed from, besides its logits: factor · softmax, where the powers have
/// this sum; the target's column, if the row has it, and its capped logit.
template <class T>
struct RowGradient {
    Powers<T> powers;
    float sum, factor;
    int64_t target;
    float target_logit;
};

/// Writes dz of a row, then the target's column. The thread that wrote the pack with this column
/// overwrites the column, so no barrier is needed. pack_at(i) is pack i of the logits.
template <class T, class Cap, class PackAt>
__device__ __forceinline__ void write_gradient(const Row<T>& row, const RowGradient<T>& g, Cap cap,
                                               PackAt&& pack_at) {
    const float scale = g.factor / g.sum;
    row.fill([&](int i) {
        float z[Pack<T>::size];
        unpack(z, pack_at(i));
#pragma unroll
        for (float& value : z) {
            const float capped = cap(value);
            value = g.powers.at(capped) * scale * cap.slope(capped);
        }
        return pack<T>(z);
    });
    if (g.target >= 0 && g.target < row.columns &&
        g.target / Row<T>::size % row_threads == threadIdx.x)
        row.data[g.target] = from_float<T>((g.powers.at(g.target_logit) * g.factor / g.sum - 1.0f) *
                                           cap.slope(g.target_logit));
}

/// The RowSum of a whole row from those of its parts, one in each block of a cluster. `shared`:
/// room for two numbers, to be kept until all blocks have read them.
template <class T, class Blocks>
__device__ __forceinline__ RowSum<T> sum_of_parts(const RowSum<T>& part, float* shared) {
    if (Blocks::is_alone) return part;
    if (threadIdx.x == 0) {
        shared[0] = part.max;
        shared[1] = part.sum;
    }
    Blocks::barrier();
    float max = -infinity;
    for (int rank = 0; rank < Blocks::size(); ++rank) max = fmaxf(max, Blocks::load(shared, rank));
    const Powers<T> powers(max);
    float sum = 0;
    for (int rank = 0; rank < Blocks::size(); ++rank)
        sum += Blocks::load(shared + 1, rank) * Powers<T>(Blocks::load(shared, rank)).to(powers);
    return {max, sum, powers};
}

/// Rows of logits [rows, Vp] and their targets. The first `columns` elements of a row are the
/// vocabulary, or its part from first_column on.
template <class T>
struct LogitRows {
    T* logits;
    int Vp, columns;
    const int32_t* targets;
    int64_t first_column;

    LogitRows(const Tensor& of, const int32_t* of_rows, int64_t count, int64_t first = 0)
        : logits(static_cast<T*>(of.data)),
          Vp(static_cast<int>(of.cols())),
          columns(static_cast<int>(count)),
          targets(of_rows),
          first_column(first) {}
    __device__ __forceinline__ Row<T> row(int64_t index) const {
        return Row<T>(logits + index * Vp, columns, Vp);
    }
};

/// Losses of a chunk of rows and, if `backward`, dz in place of the logits [rows, Vp]. A block, or
/// if in_cluster, a cluster of blocks takes one row, adds it up while it arrives in `shared_packs`,
/// and reads it there once more. Each thread works on packs that it copied itself.
template <class T, bool in_cluster, class Cap>
__global__ void __launch_bounds__(row_threads, 2)
    loss_in_shared_memory(const LogitRows<T> rows, float* losses, bool backward, float z_loss,
                          const Cap cap) {
    extern __shared__ uint4 shared_packs[];
    __shared__ WarpNumbers of_warps;
    __shared__ float part_sum[2];
    using Blocks = Cluster<in_cluster>;
    const int index = static_cast<int>(blockIdx.x) / Blocks::size();
    const Row<T> whole = rows.row(index);
    const int part = ceil_div(whole.packs, Blocks::size()) * Row<T>::size,
              first = Blocks::rank() * part;
    const Row<T> row = Blocks::is_alone ? whole : whole.part(first, part);
    if (rows.targets[index] == ignored_target) {
        if (threadIdx.x == 0 && first == 0) losses[index] = 0;
        if (backward) row.clear();
        return;
    }
    const int target =
        rows.targets[index] - first;  // outside of [0, row.columns) in the other blocks
    T* const z = reinterpret_cast<T*>(shared_packs);
    int pack = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int group = 0; group < max_groups; ++group) {
#pragma unroll
        for (int i = 0; i < group_packs; ++i, pack += row_threads)
            if (pack < row.whole)
                __pipeline_memcpy_async(z + pack * Row<T>::size, row.data + pack * Row<T>::size,
                                        16);
        __pipeline_commit();
    }
    for (int i = row.first_not_whole(); i < row.packs; i += row_threads)
        row.load_elements(i).store(z + i * Row<T>::size);

    // There are max_groups groups of copies, the last ones empty if the row is shorter. Waiting for
    // the next one starts another empty group, so that the number to wait for is always the same.
    const auto pack_at = [&](int i) { return Pack<T>::load(z + i * Row<T>::size); };
    const auto wait_for_group = [] {
        __pipeline_commit();
        __pipeline_wait_prior(max_groups);
    };
    const RowSum<T> total =
        sum_of_parts<T, Blocks>(sum_of_row<T>(row.packs, cap, of_warps, pack_at, wait_for_group,
                                              [] { __pipeline_wait_prior(0); }),
                                part_sum);
    Blocks::arrive();
    const bool has_target = target >= 0 && target < row.columns;
    const bool is_wrong =
        first == 0 && (target < 0 || target >= rows.columns);  // its loss is infinite
    const float target_logit = has_target ? cap(to_float(z[target])) : -infinity;
    if (threadIdx.x == 0 && (has_target || is_wrong))
        losses[index] = logf(total.of_exponentials()) + (total.max - target_logit);
    if (backward)
        write_gradient(row,
                       RowGradient<T>{total.powers, total.sum,
                                      softmax_factor(total.max, total.of_exponentials(), z_loss),
                                      target, target_logit},
                       cap, pack_at);
    Blocks::wait();  // until all have read this block's sum
}

/// Row statistics (max, Σ exp(z − max), z_target) over the first `columns` of the capped logits
/// [rows, Vp], and the losses computed from them if `losses` is not null. Reads each row once.
template <class T, class Cap>
__global__ void __launch_bounds__(row_threads)
    row_statistics(float* stats, float* losses, const LogitRows<T> rows, const Cap cap) {
    __shared__ WarpNumbers of_warps;
    const Row<T> row = rows.row(blockIdx.x);
    const auto pack_at = [&](int i) { return row.load(i); };
    const auto no_wait = [] {};
    const RowSum<T> total = sum_of_row<T>(row.packs, cap, of_warps, pack_at, no_wait, no_wait);
    if (threadIdx.x != 0) return;
    const int32_t target = rows.targets[blockIdx.x];
    const int64_t column = target - rows.first_column;
    const bool here = target != ignored_target && column >= 0 && column < rows.columns;
    const float target_logit = here ? cap(to_float(row.data[column])) : -infinity;
    float* const out = stats + 3 * int64_t{blockIdx.x};
    out[0] = total.max;
    out[1] = total.of_exponentials();
    out[2] = target_logit;
    if (losses)
        losses[blockIdx.x] =
            target == ignored_target ? 0.0f : logf(out[1]) + (total.max - target_logit);
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
    const Powers<float> powers(max);
    for (int64_t part = 0; part < parts; ++part) sum += of(part)[1] * powers.at(of(part)[0]);
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
template <class T, class Cap>
__global__ void __launch_bounds__(row_threads)
    row_gradient(const LogitRows<T> rows, const float* stats, float z_loss, const Cap cap) {
    const Row<T> row = rows.row(blockIdx.x);
    const int32_t target = rows.targets[blockIdx.x];
    if (target == ignored_target) {
        row.clear();
        return;
    }
    const float* const of_row = stats + 3 * int64_t{blockIdx.x};
    const Powers<T> powers(of_row[0]);
    write_gradient(row,
                   RowGradient<T>{powers, of_row[1] * powers.at(of_row[0]),
                                  softmax_factor(of_row[0], of_row[1], z_loss),
                                  target - rows.first_column, of_row[2]},
                   cap, [&](int i) { return row.load(i); });
}

/// out [R, V] = the capped logits [R, Vp] without the padding, in fp32. Blocks of (row, tile of
/// columns).
constexpr int cast_threads = 256, cast_columns = 4 * cast_threads;
template <class T, class Cap>
__global__ void __launch_bounds__(cast_threads)
    cast_rows(float* out, const T* logits, int64_t V, int64_t Vp, const Cap cap) {
    const int64_t row = blockIdx.x, tile = int64_t{blockIdx.y} * cast_columns;
#pragma unroll
    for (int i = 0; i < cast_columns; i += cast_threads) {
        const int64_t column = tile + i + threadIdx.x;
        if (column < V) out[row * V + column] = cap(to_float(logits[row * Vp + column]));
    }
}

/// total (+)= Σ losses[0..n). One block, so the order is always the same; tens of thousands of
/// numbers take microseconds.
constexpr int sum_threads = 1024;

/// rounded_loss() on the device.
__device__ double rounded_sum(double x) {
    constexpr double units = 1 << 20;
    return rint(x * units) / units;
}

__global__ void __launch_bounds__(sum_threads)
    sum_losses(double* total, const float* losses, int64_t n, bool accumulate, bool exact) {
    __shared__ double sums[sum_threads / warp_size];
    double sum = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < n; i += sum_threads) sum += static_cast<double>(losses[i]);
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) *total = (accumulate ? *total : 0.0) + (exact ? rounded_sum(sum) : sum);
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
    if (threadIdx.x == 0)
        args.totals[source] =
            (args.accumulate ? args.totals[source] : 0.0) + (args.exact ? rounded_sum(sum) : sum);
}

unsigned blocks_for(const Tensor& logits) {
    assert(logits.rows() <= INT_MAX && logits.cols() <= INT_MAX);
    return static_cast<unsigned>(logits.rows());
}

/// Calls f with the element type of logits and their cap.
template <class F>
decltype(auto) with_element_and_cap(DType dtype, float softcap, F&& f) {
    return with_element_type(dtype, [&](auto type) {
        return with_cap<decltype(type)>(softcap, [&](auto cap) { return f(type, cap); });
    });
}

/// And the losses if `losses` is not null.
void launch_statistics(Stream& stream, const SoftmaxStats& args, float* losses) {
    const Tensor& logits = args.logits;
    with_element_and_cap(logits.dtype, args.softcap, [&](auto type, auto cap) {
        row_statistics<<<blocks_for(logits), row_threads, 0, stream_of(stream)>>>(
            args.stats.as<float>(), losses,
            LogitRows<decltype(type)>(logits, args.targets, args.columns, args.first_column), cap);
        CUDA_CHECK_LAUNCH();
    });
}

size_t shared_row_bytes(int64_t V, DType dtype) {
    return ceil_div<size_t>(static_cast<size_t>(V) * size_of(dtype), 16) * 16;
}

bool fits_block(const DeviceLimits& limits, size_t row_bytes) {
    constexpr size_t reductions = 2 * (row_warps + 1) * sizeof(float);
    return row_bytes <= max_shared_row_bytes &&
           row_bytes + reductions <= limits.shared_bytes_per_block;
}

/// Launches loss_in_shared_memory for rows of logits. Returns false if no cluster can hold a row.
template <class T, class Cap, class... Args>
bool launch_in_shared_memory(Stream& stream, unsigned rows, size_t row_bytes, const Args&... args) {
    const DeviceLimits& limits = limits_of(stream);
    const auto prepare = [](auto kernel, size_t bytes) {
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(bytes)));
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    };
    if (fits_block(limits, row_bytes)) {
        const auto kernel = loss_in_shared_memory<T, false, Cap>;
        prepare(kernel, row_bytes);
        kernel<<<rows, row_threads, row_bytes, stream_of(stream)>>>(args...);
        CUDA_CHECK_LAUNCH();
        return true;
    }
    const auto part = [&](unsigned blocks) {
        return ceil_div<size_t>(row_bytes, size_t{16} * blocks) * 16;
    };
    unsigned blocks = 2;
    while (blocks < max_cluster_blocks && !fits_block(limits, 2 * part(blocks))) blocks *= 2;
    if (!fits_block(limits, part(blocks))) return false;
    const auto kernel = loss_in_shared_memory<T, true, Cap>;
    ClusterLaunch launch(stream, blocks, row_threads, part(blocks));
    if (!launch.has_clusters(limits, kernel)) return false;
    prepare(kernel, part(blocks));
    if (launch.resident(kernel) == 0) return false;
    launch.config.gridDim = rows * blocks;
    CUDA_CHECK(cudaLaunchKernelEx(&launch.config, kernel, args...));
    return true;
}

size_t stats_bytes(int64_t rows) { return static_cast<size_t>(3 * rows) * sizeof(float); }

/// Losses of one chunk of rows, which begins at row `first`, and with dx, dz in place of the
/// logits. Which kernel runs depends only on the vocabulary, the dtype and the GPU, so an
/// evaluation gives the same bits as a training step.
void chunk_loss(Stream& stream, const HeadLoss& args, int64_t first, Tensor logits) {
    const int32_t* targets = args.targets + first;
    float* losses = args.losses + first;
    const bool backward = static_cast<bool>(args.dx);
    const bool launched =
        with_element_and_cap(logits.dtype, args.softcap, [&](auto type, auto cap) {
            using T = decltype(type);
            return launch_in_shared_memory<T, decltype(cap)>(
                stream, blocks_for(logits), shared_row_bytes(args.V, logits.dtype),
                LogitRows<T>(logits, targets, args.V), losses, backward, args.z_loss, cap);
        });
    if (launched) return;
    const Tensor stats{
        stream.scratch_for<float>(stats_bytes(logits.rows())), DType::fp32, {logits.rows(), 3}};
    launch_statistics(stream,
                      {.stats = stats,
                       .logits = logits,
                       .targets = targets,
                       .columns = args.V,
                       .softcap = args.softcap},
                      losses);
    if (backward)
        cuda::softmax_backward(stream, {.logits = logits,
                                        .stats = stats,
                                        .targets = targets,
                                        .columns = args.V,
                                        .z_loss = args.z_loss,
                                        .softcap = args.softcap});
}

/// The same for a part of the vocabulary; `first` is the chunk's first row.
void chunk_loss_of_part(Stream& stream, const HeadLoss& args, int64_t first, Tensor logits) {
    const Tensor stats = args.stats.row_range(0, logits.rows());
    const int32_t* targets = args.targets + first;
    cuda::softmax_stats(stream, {.stats = stats,
                                 .logits = logits,
                                 .targets = targets,
                                 .first_column = args.first_column,
                                 .columns = args.V,
                                 .softcap = args.softcap});
    args.combine(stream, stats);
    cuda::losses_of_stats(stream, args.losses + first, stats, targets);
    if (args.dx)
        cuda::softmax_backward(stream, {.logits = logits,
                                        .stats = stats,
                                        .targets = targets,
                                        .first_column = args.first_column,
                                        .columns = args.V,
                                        .z_loss = args.z_loss,
                                        .softcap = args.softcap});
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
            chunk_loss(stream, args, first, logits);
        if (!args.dx) continue;
        cuda::linear_backward_input(
            stream, {.dx = args.dx.row_range(first, rows), .dy = logits, .w = args.w});
        if (!dw) continue;
        cuda::linear_backward_weight(stream, {.dw = dw, .x = x, .dy = logits});
        dw.accumulate = true;
    }
}

void head_logits(Stream& stream, const HeadLogits& args) {
    const int64_t R = args.x.rows(), V = args.out.cols(), Vp = args.w.rows();
    const Tensor logits = args.logits.row_range(0, R);
    cuda::linear_forward(stream, {.out = logits, .x = args.x, .w = args.w});
    with_element_and_cap(logits.dtype, args.softcap, [&](auto type, auto cap) {
        const dim3 blocks(static_cast<unsigned>(R),
                          static_cast<unsigned>(ceil_div<int64_t>(V, cast_columns)));
        cast_rows<<<blocks, cast_threads, 0, stream_of(stream)>>>(
            args.out.as<float>(), static_cast<const decltype(type)*>(logits.data), V, Vp, cap);
        CUDA_CHECK_LAUNCH();
    });
}

void softmax_stats(Stream& stream, const SoftmaxStats& args) {
    launch_statistics(stream, args, nullptr);
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

void softmax_backward(Stream& stream, const SoftmaxBackward& args) {
    const Tensor& logits = args.logits;
    with_element_and_cap(logits.dtype, args.softcap, [&](auto type, auto cap) {
        row_gradient<<<blocks_for(logits), row_threads, 0, stream_of(stream)>>>(
            LogitRows<decltype(type)>(logits, args.targets, args.columns, args.first_column),
            args.stats.as<float>(), args.z_loss, cap);
        CUDA_CHECK_LAUNCH();
    });
}

void accumulate_loss(Stream& stream, double* total, const float* losses, int64_t n, bool accumulate,
                     bool exact) {
    sum_losses<<<1, sum_threads, 0, stream_of(stream)>>>(total, losses, n, accumulate, exact);
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
