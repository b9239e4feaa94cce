// Rounding to fp8 in the kernel that computes a matrix. A block rounds a tile of the matrix. It
// writes the codes of the tile and of its transpose, and the tile's largest magnitude. Maxima of
// magnitudes are integer atomics, which do not depend on the order.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/fp8_math.h"

namespace train_gpt::cuda {

constexpr int round_threads = 256;

/// The larger of a magnitude and |value|, NaN if one of them is.
__device__ __forceinline__ float larger_magnitude(float most, float value) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(most), "f"(fabsf(value)));
    return larger;
}

/// The largest magnitude of a block's threads goes to *to.
__device__ __forceinline__ void add_magnitude(unsigned* to, float most) {
    const unsigned magnitude = __reduce_max_sync(~0u, magnitude_of(most));
    if (threadIdx.x % warp_size == 0 && magnitude > 0) atomicMax(to, magnitude);
}

/// Two codes, of scale · low in the low byte, by an instruction that only GPUs with fp8 products
/// have. It takes an infinity for the largest number, as the product of a finite value that is too
/// large for fp32; 0 · ∞ makes a NaN of an infinite value.
template <class Format>
__device__ __forceinline__ uint16_t code_pair(float low, float high, float scale) {
    uint16_t pair;
    low = __fmaf_rn(0.0f, low, low * scale), high = __fmaf_rn(0.0f, high, high * scale);
    if constexpr (std::is_same_v<Format, E4M3>)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

/// codes[i] = fp8_code(fp8_scaled(values[i], scale)).
template <class Format, int width>
__device__ __forceinline__ void to_codes(uint8_t (&codes)[width], const float (&values)[width],
                                         float scale) {
#if __CUDA_ARCH__ >= 890
    constexpr bool in_pairs = width % 2 == 0;
#else
    constexpr bool in_pairs = false;
#endif
    if constexpr (in_pairs) {
#pragma unroll
        for (int e = 0; e < width; e += 2) {
            const uint16_t pair = code_pair<Format>(values[e], values[e + 1], scale);
            __builtin_memcpy(codes + e, &pair, sizeof pair);
        }
    } else {
#pragma unroll
        for (int e = 0; e < width; ++e) codes[e] = fp8_code<Format>(fp8_scaled(values[e], scale));
    }
}

/// `width` codes to addresses that are a multiple of as many bytes.
template <int width>
__device__ __forceinline__ void store_codes(uint8_t* to, const uint8_t (&codes)[width]) {
    if constexpr (width == 8) {
        uint2 bytes;
        __builtin_memcpy(&bytes, codes, sizeof bytes);
        *reinterpret_cast<uint2*>(to) = bytes;
    } else if constexpr (width == 4) {
        unsigned bytes;
        __builtin_memcpy(&bytes, codes, sizeof bytes);
        *reinterpret_cast<unsigned*>(to) = bytes;
    } else {
        static_assert(width == 1);
        *to = codes[0];
    }
}

/// Four columns of `rows` rows of codes: a byte each of as many words.
template <int rows>
struct Transposed {
    unsigned columns[4][rows / 4];

    __device__ __forceinline__ Transposed(const uint8_t* first, int stride) {
#pragma unroll
        for (int i = 0; i < rows / 4; ++i) {
            unsigned word[4];
#pragma unroll
            for (int r = 0; r < 4; ++r)
                word[r] = *reinterpret_cast<const unsigned*>(first + (4 * i + r) * stride);
            const unsigned low[2] = {__byte_perm(word[0], word[1], 0x5140),
                                     __byte_perm(word[2], word[3], 0x5140)},
                           high[2] = {__byte_perm(word[0], word[1], 0x7362),
                                      __byte_perm(word[2], word[3], 0x7362)};
            columns[0][i] = __byte_perm(low[0], low[1], 0x5410);
            columns[1][i] = __byte_perm(low[0], low[1], 0x7632);
            columns[2][i] = __byte_perm(high[0], high[1], 0x5410);
            columns[3][i] = __byte_perm(high[0], high[1], 0x7632);
        }
    }
    __device__ __forceinline__ void store(uint8_t* to, int column) const {
        using Bytes = std::conditional_t<rows == 16, uint4, uint2>;
        static_assert(sizeof(Bytes) == rows);
        Bytes bytes;
        __builtin_memcpy(&bytes, columns[column], sizeof bytes);
        *reinterpret_cast<Bytes*>(to) = bytes;
    }
};

/// Where the codes of a matrix go, and its scale.
struct RoundTile {
    uint8_t *codes, *transposed;  // either may be null
    float* inverse;
    const float* scale;             // null, or 0: of the largest magnitude
    const unsigned* largest;        // null: none was looked for
    unsigned* amax;                 // may be null
    const int32_t* row_count;       // null: there are `rows`
    int64_t rows, cols, tiles = 0;  // tiles of 64 columns
};

/// A block rounds 64 × 64 elements. A thread computes `width` columns of a row; the transpose goes
/// through shared memory. There are four bytes between its rows, so that threads which read rows
/// next to each other, or 16 rows further down, use other banks.
constexpr int round_edge = 64, round_stride = round_edge + 4;

/// source.load(values, row, col): `width` numbers of a row from a column on, as their dtype has
/// them.
template <class Format, int width, class Source>
__global__ void __launch_bounds__(round_threads) round_tile(RoundTile args, Source source) {
    constexpr int threads_per_row = round_edge / width,
                  rows_at_once = round_threads / threads_per_row;
    __shared__ alignas(4) uint8_t shared[round_edge][round_stride];
    float scale = args.scale ? *args.scale : 0;
    if (scale == 0)
        scale = args.largest ? fp8_scale(__uint_as_float(*args.largest), Format::largest) : 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) *args.inverse = 1 / scale;

    const int64_t rows = args.row_count ? *args.row_count : args.rows,
                  first_row = blockIdx.x / args.tiles * round_edge,
                  first_col = blockIdx.x % args.tiles * round_edge;
    const int col = static_cast<int>(threadIdx.x) % threads_per_row * width;
    float most = 0;
    for (int row = static_cast<int>(threadIdx.x) / threads_per_row; row < round_edge;
         row += rows_at_once) {
        if (first_row + row >= rows || first_col + col >= args.cols) continue;
        float values[width];
        source.load(values, first_row + row, first_col + col);
        alignas(8) uint8_t codes[width];
#pragma unroll
        for (int e = 0; e < width; ++e) most = larger_magnitude(most, values[e]);
        to_codes<Format>(codes, values, scale);
        constexpr int word = width < 4 ? width : 4;
#pragma unroll
        for (int e = 0; e < width; e += word)
            __builtin_memcpy(__builtin_assume_aligned(&shared[row][col + e], word), codes + e,
                             word);
        if (args.codes)
            store_codes<width>(args.codes + (first_row + row) * args.cols + first_col + col, codes);
    }
    if (args.amax) add_magnitude(args.amax, most);
    if (!args.transposed) return;
    __syncthreads();
    // Where rows are a multiple of 16, threads of two warps write 16 rows of four columns.
    constexpr int piece = 16, pieces = round_edge / piece;
    const int thread = static_cast<int>(threadIdx.x);
    if (args.rows % piece == 0 && reinterpret_cast<uintptr_t>(args.transposed) % piece == 0) {
        const int row = (thread / warp_size * 2 + thread % 2) * piece,
                  column = thread % warp_size / 2 * 4;
        if (row >= round_edge || first_row + row >= rows) return;
        const Transposed<piece> own(&shared[row][column], round_stride);
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (first_col + column + c < args.cols)
                own.store(args.transposed + (first_col + column + c) * args.rows + first_row + row,
                          c);
        return;
    }
    static_assert(round_threads == round_edge * pieces);
    const int column = thread / pieces, row = thread % pieces * piece;
    if (first_col + column >= args.cols) return;
    uint8_t* const to = args.transposed + (first_col + column) * args.rows + first_row + row;
    for (int i = 0; i < piece && first_row + row + i < args.rows; ++i)
        to[i] = shared[row + i][column];
}

/// Launches round_tile() for a matrix.
template <class Format, int width, class Source>
void launch_round_tile(Stream& stream, RoundTile args, const Source& source) {
    args.tiles = ceil_div<int64_t>(args.cols, round_edge);
    const auto blocks =
        static_cast<unsigned>(ceil_div<int64_t>(args.rows, round_edge) * args.tiles);
    round_tile<Format, width><<<blocks, round_threads, 0, stream_of(stream)>>>(args, source);
    CUDA_CHECK_LAUNCH();
}

/// Where a kernel that rounds its own result writes it.
inline RoundTile round_tile_of(const Fp8Output& to, int64_t rows, int64_t cols) {
    return {.codes = static_cast<uint8_t*>(to.codes.data),
            .transposed = static_cast<uint8_t*>(to.transposed.data),
            .inverse = to.scaling.inverse,
            .scale = to.scaling.scale,
            .largest = nullptr,
            .amax = reinterpret_cast<unsigned*>(to.scaling.amax),
            .row_count = nullptr,
            .rows = rows,
            .cols = cols};
}

}  // namespace train_gpt::cuda
