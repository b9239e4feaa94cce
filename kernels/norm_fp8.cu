// The forward pass of norms whose output only products in fp8 read: its codes and those of its
// transpose are written, its values are not.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "device/cuda_queue.h"
#include "kernels/fp8_tile.cuh"
#include "kernels/norm.h"
#include "kernels/norm_rows.cuh"

namespace train_gpt::cuda {

namespace {

/// A block takes 32 rows at a time, or 16 where 32 do not fit into shared memory, and each of its
/// warps one of them after the other. Their codes wait in shared memory for the transpose: 16 rows
/// of a column are 16 bytes. w, b and bias are in shared memory, too, so that they are read once.
constexpr int threads = 512, warps = threads / warp_size, piece = 16, most_rows = 32;
/// A warp has a row of up to 8 packs for each lane, C <= 2048 in bf16, as in norm.cu: longer ones are
/// summed there by a block, in another order.
constexpr int most_packs = 8;

/// Four banks between rows: 16 rows further down, a thread reads other banks.
constexpr int row_stride(int C) { return C + 4; }

/// Four columns of 16 rows of codes: a byte each of 16 words.
struct Transposed {
    uint4 columns[4];

    __device__ __forceinline__ Transposed(const uint8_t* first, int stride) {
        unsigned parts[4][4];  // [column][four rows]
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unsigned word[4];
#pragma unroll
            for (int r = 0; r < 4; ++r)
                word[r] = *reinterpret_cast<const unsigned*>(first + (4 * i + r) * stride);
            const unsigned low[2] = {__byte_perm(word[0], word[1], 0x5140),
                                     __byte_perm(word[2], word[3], 0x5140)},
                           high[2] = {__byte_perm(word[0], word[1], 0x7362),
                                      __byte_perm(word[2], word[3], 0x7362)};
            parts[0][i] = __byte_perm(low[0], low[1], 0x5410);
            parts[1][i] = __byte_perm(low[0], low[1], 0x7632);
            parts[2][i] = __byte_perm(high[0], high[1], 0x5410);
            parts[3][i] = __byte_perm(high[0], high[1], 0x7632);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
            columns[c] = {parts[c][0], parts[c][1], parts[c][2], parts[c][3]};
    }
};

template <class T, int packs>
__global__ void __launch_bounds__(threads)
    forward_codes(ForwardArgs<T> args, RoundTile to, int rows_at_once) {
    extern __shared__ uint4 dynamic_shared[];
    auto* const codes = reinterpret_cast<uint8_t*>(dynamic_shared);
    const int stride = row_stride(args.C);
    keep_vectors(args, dynamic_shared + (rows_at_once * stride + 15) / 16);
    const float scale = *to.scale;
    if (blockIdx.x == 0 && threadIdx.x == 0) *to.inverse = 1 / scale;
    __syncthreads();

    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    unsigned most = 0;
    for (int64_t first = int64_t{blockIdx.x} * rows_at_once; first < args.M;
         first += int64_t{gridDim.x} * rows_at_once) {
        for (int r = warp; r < rows_at_once && first + r < args.M; r += warps)
            forward_row<T, packs>(
                args, first + r, warp_size, lane, [](float value) { return warp_sum(value); },
                [&](int column, const Pack<T>& own) {
                    constexpr int size = Pack<T>::size;
                    float values[size];
                    unpack(values, own);
                    alignas(8) uint8_t of_pack[size];
#pragma unroll
                    for (int e = 0; e < size; ++e) {
                        most = max(most, magnitude_of(values[e]));
                        of_pack[e] = fp8_code<E4M3>(values[e] * scale);
                    }
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
        const int pieces = static_cast<int>(min(int64_t{rows_at_once}, args.M - first)) / piece;
        for (int i = static_cast<int>(threadIdx.x); i < args.C / 4 * pieces; i += threads) {
            const int row = i % pieces * piece, column = i / pieces * 4;
            const Transposed own(codes + row * stride + column, stride);
#pragma unroll
            for (int c = 0; c < 4; ++c)
                *reinterpret_cast<uint4*>(to.transposed + (column + c) * args.M + first + row) =
                    own.columns[c];
        }
        __syncthreads();  // before the next rows take the place of these
    }
    if (to.amax) add_magnitude(to.amax, most);
}

/// Calls f(std::integral_constant<int, n>{}) for the least n of 1, 2, 4 and 8 that is enough.
template <int n = 1, class F>
void with_packs(int64_t needed, F&& f) {
    if constexpr (n < most_packs) {
        if (needed > n) return with_packs<2 * n>(needed, f);
    }
    f(std::integral_constant<int, n>{});
}

size_t shared_bytes(int64_t rows, int64_t C, int64_t vectors, DType dtype) {
    return static_cast<size_t>((rows * row_stride(static_cast<int>(C)) + 15) / 16 * 16 +
                               vectors * C * static_cast<int64_t>(size_of(dtype)));
}

/// Rows at a time of norms with up to three vectors; 0: they do not fit.
int64_t rows_at_once(const Stream& stream, DType dtype, int64_t C) {
    for (const int64_t rows : {most_rows, piece})
        if (shared_bytes(rows, C, 3, dtype) <= limits_of(stream).shared_bytes_per_block)
            return rows;
    return 0;
}

template <class T>
void forward(Stream& stream, const NormForward& args) {
    const int64_t M = args.x.rows(), C = args.x.cols(),
                  packs = ceil_div<int64_t>(C, Pack<T>::size * warp_size);
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
    const int64_t rows = rows_at_once(stream, args.x.dtype, C),
                  vectors = 1 + bool{args.b} + bool{args.bias};
    const size_t bytes = shared_bytes(rows, C, vectors, args.x.dtype);
    with_packs(packs, [&](auto per_lane) {
        auto* const kernel = forward_codes<T, per_lane.value>;
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(bytes)));
        int resident = 0;
        CUDA_CHECK(
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, bytes));
        const int64_t blocks = std::min<int64_t>(
            ceil_div(M, rows), limits_of(stream).multiprocessors * std::max(resident, 1));
        kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream_of(stream)>>>(
            kernel_args, round_tile_of(args.rounded, M, C), static_cast<int>(rows));
        CUDA_CHECK_LAUNCH();
    });
}

}  // namespace

bool norm_rounds(const Stream& stream, DType dtype, int64_t M, int64_t C) {
    return M % piece == 0 && C % 16 == 0 &&
           C <= int64_t{warp_size} * most_packs * 16 / static_cast<int64_t>(size_of(dtype)) &&
           rows_at_once(stream, dtype, C) > 0;
}

void norm_forward_rounded(Stream& stream, const NormForward& args) {
    with_element_type(args.x.dtype, [&](auto type) { forward<decltype(type)>(stream, args); });
}

}  // namespace train_gpt::cuda
