// The forward pass of norms whose output only products in fp8 read: its codes and those of its
// transpose are written, its values are not.
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "device/cuda_queue.h"
#include "kernels/fp8_tile.cuh"
#include "kernels/norm.h"
#include "kernels/norm_rows.cuh"

namespace train_gpt::cuda {

namespace {

/// A block takes 32 rows at a time, or 16 or 8 where more do not fit into shared memory. Their
/// codes wait there for the transpose, so x is read once. 32 rows of a column are a sector of the
/// transpose; with fewer rows, neighbouring blocks write its parts at about the same time, and the
/// L2 cache joins them. w, b and bias are in shared memory, too, where there is room, so that a
/// block reads them once.
constexpr int most_rows = 32;

/// Rows of a transpose are a multiple of so many bytes.
constexpr int row_multiple = 16;

/// Four bytes between rows: threads that read rows next to each other, or 16 rows further down, use
/// other banks.
constexpr int row_stride(int C) { return C + 4; }

/// A row belongs to a warp. A block's warps take its rows one after the other.
template <class T, int packs_>
struct OneWarp {
    static constexpr int packs = packs_, most_threads = 512, least_rows = 16, shared_bytes = 0;
    static int lanes_of(int64_t) { return warp_size; }

    static constexpr int lanes = warp_size;
    const int index = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size,
              count = static_cast<int>(blockDim.x) / warp_size;

    __device__ explicit OneWarp(int /*lanes*/) {}
    __device__ __forceinline__ float sum(float value) const { return warp_sum(value); }
};

/// A row belongs to as many warps as in norm.cu, which add in the same order. A block's groups of
/// warps take its rows one after the other, and do not wait for each other.
template <class T>
struct SeveralWarps {
    static constexpr int packs = block_elements / Pack<T>::size, least_rows = 8;
    /// In fp32, a thread needs more than the 64 registers that 1024 threads leave it.
    static constexpr int most_threads = sizeof(T) == 4 ? 640 : 1024;
    static constexpr int most_sums = 2 * most_threads / warp_size,
                         shared_bytes = most_sums * static_cast<int>(sizeof(float));
    static int lanes_of(int64_t C) { return threads_of_row(C); }

    const int lanes, index, lane, count;
    float* sums;  // [2, warps]: sums take turns with the halves, so one barrier for each is enough
    int turn = 0;

    __device__ explicit SeveralWarps(int lanes_)
        : lanes(lanes_),
          index(static_cast<int>(threadIdx.x) / lanes),
          lane(static_cast<int>(threadIdx.x) % lanes),
          count(static_cast<int>(blockDim.x) / lanes) {
        __shared__ float shared[most_sums];
        sums = shared + index * 2 * (lanes / warp_size);
    }
    __device__ __forceinline__ float sum(float value) {
        const int warps = lanes / warp_size;
        float* const own = sums + (turn ^= 1) * warps;
        value = warp_sum(value);
        if (lane % warp_size == 0) own[lane / warp_size] = value;
        // Barrier 0 is the block's. Rows have two warps or more, so there are fewer than 16 groups.
        static_assert(most_threads / (2 * warp_size) <= 16);
        asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "r"(lanes) : "memory");
        float total = 0;
        for (int warp = 0; warp < warps; ++warp) total += own[warp];
        return total;
    }
};

/// to[column · M + row] = codes[row, column] for `rows` rows, all threads of a block together: each
/// takes `piece` rows of four columns.
template <int piece>
__device__ __forceinline__ void store_transposed(uint8_t* to, int64_t M, const uint8_t* codes,
                                                 int rows, int C) {
    const int pieces = rows / piece, stride = row_stride(C);
    for (int i = static_cast<int>(threadIdx.x); i < C / 4 * pieces;
         i += static_cast<int>(blockDim.x)) {
        const int row = i % pieces * piece, column = i / pieces * 4;
        const Transposed<piece> own(codes + row * stride + column, stride);
#pragma unroll
        for (int c = 0; c < 4; ++c) own.store(to + (column + c) * M + row, c);
    }
}

/// Owners: OneWarp or SeveralWarps, who share a row; `lanes` threads.
template <class T, class Owners>
__global__ void __launch_bounds__(Owners::most_threads, 1)
    forward_codes(ForwardArgs<T> args, RoundTile to, int lanes, int rows_at_once,
                  bool keeps_vectors) {
    extern __shared__ uint4 dynamic_shared[];
    auto* const codes = reinterpret_cast<uint8_t*>(dynamic_shared);
    const int stride = row_stride(args.C);
    if (keeps_vectors) keep_vectors(args, dynamic_shared + (rows_at_once * stride + 15) / 16);
    const float scale = *to.scale;
    if (blockIdx.x == 0 && threadIdx.x == 0) *to.inverse = 1 / scale;
    __syncthreads();

    Owners owners(lanes);
    float most = 0;
    for (int64_t first = int64_t{blockIdx.x} * rows_at_once; first < args.M;
         first += int64_t{gridDim.x} * rows_at_once) {
        for (int r = owners.index; r < rows_at_once && first + r < args.M; r += owners.count)
            forward_row<T, Owners::packs>(
                args, first + r, owners.lanes, owners.lane,
                [&](float value) { return owners.sum(value); },
                [&](int column, const Pack<T>& own) {
                    constexpr int size = Pack<T>::size;
                    float values[size];
                    unpack(values, own);
                    alignas(8) uint8_t of_pack[size];
#pragma unroll
                    for (int e = 0; e < size; ++e) most = larger_magnitude(most, values[e]);
                    to_codes<E4M3>(of_pack, values, scale);
                    if (to.codes)
                        store_codes<size>(to.codes + (first + r) * args.C + column, of_pack);
                    unsigned words[size / 4];
                    __builtin_memcpy(words, of_pack, sizeof words);
                    auto* const kept = reinterpret_cast<unsigned*>(codes + r * stride + column);
#pragma unroll
                    for (int i = 0; i < size / 4; ++i) kept[i] = words[i];
                });
        if (!to.transposed) continue;
        __syncthreads();
        const int rows = static_cast<int>(min(int64_t{rows_at_once}, args.M - first));
        uint8_t* const transposed = to.transposed + first;
        if (Owners::least_rows >= 16 || rows >= 16)
            store_transposed<16>(transposed, args.M, codes, rows, args.C);
        else
            store_transposed<8>(transposed, args.M, codes, rows, args.C);
        __syncthreads();  // before the next rows take the place of these
    }
    if (to.amax) add_magnitude(to.amax, most);
}

/// How blocks work on rows of some width. No rows: they do not fit.
struct BlockShape {
    int threads = 0, rows = 0;
    bool keeps_vectors = false;
    size_t shared_bytes = 0;
};

/// vectors: how many of w, b and bias there are.
template <class T, class Owners>
BlockShape block_shape(const Stream& stream, int64_t C, int vectors) {
    const int lanes = Owners::lanes_of(C);
    if (lanes > Owners::most_threads) return {};
    for (const bool keeps_vectors : {true, false})
        for (int rows = most_rows; rows >= Owners::least_rows; rows /= 2) {
            const int64_t bytes = ceil_div(rows * row_stride(static_cast<int>(C)), 16) * 16 +
                                  keeps_vectors * vectors * C * static_cast<int64_t>(sizeof(T));
            if (static_cast<size_t>(bytes) + Owners::shared_bytes >
                limits_of(stream).shared_bytes_per_block)
                continue;
            // As many groups as take their turns together.
            const int turns = ceil_div(rows, std::min(rows, Owners::most_threads / lanes));
            return {ceil_div(rows, turns) * lanes, rows, keeps_vectors, static_cast<size_t>(bytes)};
        }
    return {};
}

/// Calls f(std::type_identity<OneWarp or SeveralWarps>{}), with the least of 1, 2, 4 and 8 packs
/// for a lane that is enough.
template <class T, int packs = 1, class F>
decltype(auto) with_owners(int64_t C, F&& f) {
    if (!is_row_of_warp<T>(C)) return f(std::type_identity<SeveralWarps<T>>{});
    if constexpr (packs < warp_packs) {
        if (C > int64_t{packs} * warp_size * Pack<T>::size)
            return with_owners<T, 2 * packs>(C, std::forward<F>(f));
    }
    return f(std::type_identity<OneWarp<T, packs>>{});
}

template <class T>
void forward(Stream& stream, const NormForward& args) {
    const int64_t M = args.x.rows(), C = args.x.cols();
    const ForwardArgs<T> kernel_args{.out = nullptr,
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
    with_owners<T>(C, [&](auto type) {
        using Owners = typename decltype(type)::type;
        const BlockShape shape =
            block_shape<T, Owners>(stream, C, 1 + bool{args.b} + bool{args.bias});
        auto* const kernel = forward_codes<T, Owners>;
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shape.shared_bytes)));
        int resident = 0;
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, shape.threads,
                                                                 shape.shared_bytes));
        const int64_t blocks =
            std::min<int64_t>(ceil_div<int64_t>(M, shape.rows),
                              limits_of(stream).multiprocessors * std::max(resident, 1));
        kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(shape.threads),
                 shape.shared_bytes, stream_of(stream)>>>(
            kernel_args, round_tile_of(args.rounded, M, C), Owners::lanes_of(C), shape.rows,
            shape.keeps_vectors);
        CUDA_CHECK_LAUNCH();
    });
}

}  // namespace

bool norm_rounds(const Stream& stream, DType dtype, int64_t M, int64_t C) {
    if (M % row_multiple != 0 || C % row_multiple != 0) return false;
    return with_element_type(dtype, [&](auto element) {
        using T = decltype(element);
        return with_owners<T>(C, [&](auto type) {
            return block_shape<T, typename decltype(type)::type>(stream, C, 0).rows > 0;
        });
    });
}

void norm_forward_rounded(Stream& stream, const NormForward& args) {
    with_element_type(args.x.dtype, [&](auto type) { forward<decltype(type)>(stream, args); });
}

}  // namespace train_gpt::cuda
