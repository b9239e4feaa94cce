// A row of a norm in the forward pass, for the kernels of norm.cu and norm_fp8.cu.
#pragma once
#include <cstdint>

#include "kernels/cuda_block.cuh"

namespace train_gpt::cuda {

/// A row belongs to one warp with up to 8 packs per lane (C <= 2048 in bf16), else to several warps
/// with up to 32 elements per thread. The order of a row's sums follows from that, so all kernels
/// do alike.
constexpr int warp_packs = 8, block_elements = 32;

template <class T>
bool is_row_of_warp(int64_t C) {
    return C <= int64_t{warp_packs} * warp_size * Pack<T>::size;
}
/// How many threads share a row that is not of one warp.
inline int threads_of_row(int64_t C) {
    return static_cast<int>(ceil_div<int64_t>(C, block_elements * warp_size) * warp_size);
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

/// x += residual + bias for a pack of a row that begins at element `first`; stores the sum.
template <class T>
__device__ __forceinline__ void add_to_row(Pack<T>& x, const ForwardArgs<T>& args, int64_t first,
                                           int column) {
    constexpr int size = Pack<T>::size;
    float sum[size], residual[size], bias[size] = {};
    unpack(sum, x);
    unpack(residual, Pack<T>::load(args.residual + first + column));
    if (args.bias) unpack(bias, Pack<T>::load(args.bias + column));
#pragma unroll
    for (int i = 0; i < size; ++i) sum[i] = sum[i] + residual[i] + bias[i];
    x = pack<T>(sum);
    x.store(args.x_out + first + column);
}

/// One row, for thread `lane` of the `lanes` that share it; row_sum adds over them. Reads x once
/// and keeps it in registers as it is stored; writes stats, and put(column, pack) the norm. C <=
/// lanes · packs · pack size.
template <class T, int packs, class RowSum, class Put>
__device__ __forceinline__ void forward_row(const ForwardArgs<T>& args, int64_t row, int lanes,
                                            int lane, RowSum&& row_sum, Put&& put) {
    constexpr int size = Pack<T>::size;
    const int64_t first = row * args.C;
    const auto column = [&](int pack) { return (pack * lanes + lane) * size; };

    Pack<T> row_packs[packs] = {};  // zeros beyond the row: no register is read unwritten
#pragma unroll
    for (int k = 0; k < packs; ++k)
        if (column(k) < args.C) row_packs[k] = Pack<T>::load(args.x + first + column(k));

    float x[size], sum = 0, squares = 0;
#pragma unroll
    for (int k = 0; k < packs; ++k) {
        if (column(k) >= args.C) continue;
        if (args.x_out) add_to_row(row_packs[k], args, first, column(k));
        unpack(x, row_packs[k]);
#pragma unroll
        for (int i = 0; i < size; ++i) sum += x[i];
    }
    const float mean = args.rms ? 0.0f : row_sum(sum) / static_cast<float>(args.C);
#pragma unroll
    for (int k = 0; k < packs; ++k) {
        if (column(k) >= args.C) continue;
        unpack(x, row_packs[k]);
#pragma unroll
        for (int i = 0; i < size; ++i) squares += (x[i] - mean) * (x[i] - mean);
    }
    const float rstd = rsqrtf(row_sum(squares) / static_cast<float>(args.C) + args.epsilon);
    if (lane == 0) args.store_stats(row, mean, rstd);

#pragma unroll
    for (int k = 0; k < packs; ++k) {
        if (column(k) >= args.C) continue;
        float w[size], b[size] = {};
        unpack(x, row_packs[k]);
        unpack(w, Pack<T>::load(args.w + column(k)));
        if (args.b) unpack(b, Pack<T>::load(args.b + column(k)));
#pragma unroll
        for (int i = 0; i < size; ++i) x[i] = (x[i] - mean) * rstd * w[i] + b[i];
        put(column(k), pack<T>(x));
    }
}

/// Copies w, b and bias to shared memory, [3, C], from which they are read after this. A thread
/// copies every blockDim.x-th pack.
template <class T>
__device__ __forceinline__ void keep_vectors(ForwardArgs<T>& args, uint4* shared) {
    constexpr int size = Pack<T>::size;
    T* copies = reinterpret_cast<T*>(shared);
    for (const T** vector : {&args.w, &args.b, &args.bias}) {
        if (!*vector) continue;
        for (int column = static_cast<int>(threadIdx.x) * size; column < args.C;
             column += static_cast<int>(blockDim.x) * size)
            Pack<T>::load(*vector + column).store(copies + column);
        *vector = copies;
        copies += args.C;
    }
}

}  // namespace train_gpt::cuda
