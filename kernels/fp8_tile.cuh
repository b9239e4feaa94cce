// Rounding to fp8 in the kernel that computes a matrix: a block rounds a tile of it and writes its
// codes, those of its transpose and its largest magnitude. Maxima of magnitudes are integer
// atomics, which do not depend on the order.
#pragma once
#include <algorithm>
#include <cstdint>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/fp8_math.h"

namespace train_gpt::cuda {

constexpr int round_threads = 256;

/// The largest magnitude of a block's threads goes to *to.
__device__ __forceinline__ void add_magnitude(unsigned* to, unsigned magnitude) {
    magnitude = __reduce_max_sync(~0u, magnitude);
    if (threadIdx.x % warp_size == 0 && magnitude > 0) atomicMax(to, magnitude);
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
/// through shared memory, whose rows are a multiple of 16 bytes, four banks apart.
constexpr int round_edge = 64, round_stride = round_edge + 16;

/// source.load(values, row, col): `width` numbers of a row from a column on, as their dtype has
/// them.
template <class Format, int width, class Source>
__global__ void __launch_bounds__(round_threads) round_tile(RoundTile args, Source source) {
    constexpr int threads_per_row = round_edge / width,
                  rows_at_once = round_threads / threads_per_row;
    __shared__ alignas(16) uint8_t shared[round_edge][round_stride];  // [column][row]
    float scale = args.scale ? *args.scale : 0;
    if (scale == 0)
        scale = args.largest ? fp8_scale(__uint_as_float(*args.largest), Format::largest) : 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) *args.inverse = 1 / scale;

    const int64_t rows = args.row_count ? *args.row_count : args.rows,
                  first_row = blockIdx.x / args.tiles * round_edge,
                  first_col = blockIdx.x % args.tiles * round_edge;
    const int col = static_cast<int>(threadIdx.x) % threads_per_row * width;
    unsigned most = 0;
    for (int row = static_cast<int>(threadIdx.x) / threads_per_row; row < round_edge;
         row += rows_at_once) {
        if (first_row + row >= rows || first_col + col >= args.cols) continue;
        float values[width];
        source.load(values, first_row + row, first_col + col);
        alignas(8) uint8_t codes[width];
#pragma unroll
        for (int e = 0; e < width; ++e) {
            most = max(most, magnitude_of(values[e]));
            codes[e] = fp8_code<Format>(values[e] * scale);
            shared[col + e][row] = codes[e];
        }
        if (args.codes)
            store_codes<width>(args.codes + (first_row + row) * args.cols + first_col + col, codes);
    }
    if (args.amax) add_magnitude(args.amax, most);
    if (!args.transposed) return;
    __syncthreads();
    // Each thread writes 16 rows of a column, as a whole where rows are a multiple of 16.
    constexpr int piece = 16, pieces = round_edge / piece;
    const int column = static_cast<int>(threadIdx.x) / pieces,
              row = static_cast<int>(threadIdx.x) % pieces * piece;
    static_assert(round_threads == round_edge * pieces);
    if (first_col + column >= args.cols || first_row + row >= args.rows) return;
    uint8_t* const to = args.transposed + (first_col + column) * args.rows + first_row + row;
    if (args.rows % piece == 0 && reinterpret_cast<uintptr_t>(args.transposed) % piece == 0) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&shared[column][row]);
        return;
    }
    for (int i = 0; i < piece && first_row + row + i < args.rows; ++i)
        to[i] = shared[column][row + i];
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
