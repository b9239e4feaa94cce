// A blocked matrix product in the manner of Goto & van de Geijn, "Anatomy of High-Performance
// Matrix Multiplication" (TOMS 2008): tiles of C in registers, panels of A and B copied ("packed")
// so that the inner loop reads both in order. bf16 operands become fp32 while they are packed.
#include <algorithm>
#include <cassert>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/lanes.h"
#include "kernels/linear/gemm.h"

namespace train_gpt {

namespace {

// One vector register of floats, and the tile of C that the inner loop keeps in registers:
// tile_rows × tile_vectors accumulators, tile_vectors of B, and one broadcast element of A.
#if defined(__AVX512F__)
constexpr int vector_floats = 16, tile_rows = 14, tile_vectors = 2;  // 28 + 2 + 1 of 32 registers
#elif defined(__AVX__)
constexpr int vector_floats = 8, tile_rows = 6, tile_vectors = 2;  // 12 + 2 + 1 of 16 registers
#elif defined(__aarch64__)
constexpr int vector_floats = 4, tile_rows = 8, tile_vectors = 3;  // 24 + 3 + 1 of 32 registers
#else
constexpr int vector_floats = 4, tile_rows = 4, tile_vectors = 2;
#endif
constexpr int tile_cols = vector_floats * tile_vectors;

typedef float Vector __attribute__((vector_size(vector_floats * sizeof(float))));

// A depth_block × tile_cols panel of B stays in the first-level cache while the tiles of one group
// of A panels, which stays in the second-level cache, pass over it.
constexpr int64_t depth_block = 384;
constexpr int64_t group_rows = (168 / tile_rows) * tile_rows;
constexpr int64_t group_cols = (128 / tile_cols) * tile_cols;
// All threads work on one block of C at a time, whose packed panels of A and B they share. A packed
// element is used about 1024 times.
constexpr int64_t block_edge = 1024;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/// The block length if n is cut into equal blocks of at most block_edge, rounded up to whole tiles.
int64_t block_length(int64_t n, int64_t tile) {
    return round_up(ceil_div(n, ceil_div(n, block_edge)), tile);
}

struct Blocking {
    int64_t rows, cols, depth;  // of a block of C, and of the slice of k that is packed at a time
    bool sums;                  // partial sums of a block need fp32 memory of their own

    explicit Blocking(const GemmShape& shape)
        : rows(block_length(shape.m, tile_rows)),
          cols(block_length(shape.n, tile_cols)),
          depth(std::min(shape.k, depth_block)),
          sums(shape.out != DType::fp32 && shape.k > depth_block) {}

    size_t a_floats() const { return static_cast<size_t>(round_up(rows * depth, 16)); }
    size_t b_floats() const { return static_cast<size_t>(round_up(cols * depth, 16)); }
    size_t sum_floats() const { return sums ? static_cast<size_t>(rows * cols) : 0; }
};

/// a0 b0 a1 b1 … from the lower (half = 0) or upper (half = 1) halves of a and b.
template <int half, int... lane>
Vector interleave(Vector a, Vector b, std::integer_sequence<int, lane...>) {
#if __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(
        a, b, (half * vector_floats / 2 + lane / 2 + lane % 2 * vector_floats)...);
#else
    typedef int Lanes __attribute__((vector_size(sizeof(Vector))));
    return __builtin_shuffle(
        a, b, Lanes{(half * vector_floats / 2 + lane / 2 + lane % 2 * vector_floats)...});
#endif
}

/// Transposes a square of vectors. Interleaving row i with row i + size / 2 rotates the bits of an
/// element's index (row, column) by one; log2(size) such steps exchange row and column.
void transpose(Vector (&rows)[vector_floats]) {
    constexpr std::make_integer_sequence<int, vector_floats> lanes;
#pragma GCC unroll 4
    for (int done = 1; done < vector_floats; done *= 2) {
        Vector shuffled[vector_floats];
#pragma GCC unroll 8
        for (int i = 0; i < vector_floats / 2; ++i) {
            shuffled[2 * i] = interleave<0>(rows[i], rows[i + vector_floats / 2], lanes);
            shuffled[2 * i + 1] = interleave<1>(rows[i], rows[i + vector_floats / 2], lanes);
        }
#pragma GCC unroll 16
        for (int i = 0; i < vector_floats; ++i) rows[i] = shuffled[i];
    }
}

/// The first vector_floats elements of a line.
template <class T>
Vector load(const T* line) {
    Vector vector;
    if constexpr (std::is_same_v<T, float>) {
        std::memcpy(&vector, line, sizeof(vector));
    } else {
        typedef uint16_t Halves __attribute__((vector_size(vector_floats * sizeof(uint16_t))));
        typedef uint32_t Words __attribute__((vector_size(sizeof(Vector))));
        Halves halves;
        std::memcpy(&halves, line, sizeof(halves));
        const Words words = __builtin_convertvector(halves, Words) << 16;
        std::memcpy(&vector, &words, sizeof(vector));
    }
    return vector;
}

/// Packs `count` (at most `width`) lines of length `depth` as panel[d·width + i], padded with zeros
/// to `width` lines. Element d of line i is source[i·ld + d].
template <int width, class T>
void pack_across(float* panel, const T* source, int64_t ld, int64_t count, int64_t depth) {
    constexpr int used = std::min(width, vector_floats);  // of each transposed vector
    static_assert(width % used == 0);
    for (int64_t i = 0; i < width; i += used) {
        const int64_t lines = std::clamp<int64_t>(count - i, 0, used);
        int64_t d = 0;
        for (; d + vector_floats <= depth; d += vector_floats) {
            Vector square[vector_floats] = {};
            if (lines == used) {
#pragma GCC unroll 16
                for (int l = 0; l < used; ++l) square[l] = load(source + (i + l) * ld + d);
            } else {
                for (int64_t l = 0; l < lines; ++l) square[l] = load(source + (i + l) * ld + d);
            }
            transpose(square);
#pragma GCC unroll 16
            for (int l = 0; l < vector_floats; ++l) {
                std::memcpy(panel + (d + l) * width + i, &square[l], used * sizeof(float));
            }
        }
        for (; d < depth; ++d) {
            for (int64_t l = 0; l < used; ++l) {
                panel[d * width + i + l] = l < lines ? to_float(source[(i + l) * ld + d]) : 0.0f;
            }
        }
    }
}

/// The same, but element d of line i is source[d·ld + i].
template <int width, class T>
void pack_along(float* panel, const T* source, int64_t ld, int64_t count, int64_t depth) {
    for (int64_t d = 0; d < depth; ++d) {
        const T* line = source + d * ld;
        float* packed = panel + d * width;
        if (count == width) {
#pragma omp simd
            for (int i = 0; i < width; ++i) packed[i] = to_float(line[i]);
        } else {
            for (int64_t i = 0; i < count; ++i) packed[i] = to_float(line[i]);
            for (int64_t i = count; i < width; ++i) packed[i] = 0.0f;
        }
    }
}

/// tile [tile_rows, tile_cols] = Σ_d a[d, :]ᵀ · b[d, :] of two packed panels.
void multiply_panels(float* tile, const float* a, const float* b, int64_t depth) {
    Vector sums[tile_rows][tile_vectors] = {};
    for (int64_t d = 0; d < depth; ++d) {
        Vector b_row[tile_vectors];
#pragma GCC unroll 4
        for (int v = 0; v < tile_vectors; ++v) {
            std::memcpy(&b_row[v], b + v * vector_floats, sizeof(Vector));
        }
#pragma GCC unroll 16
        for (int r = 0; r < tile_rows; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < tile_vectors; ++v) sums[r][v] += a[r] * b_row[v];
        }
        a += tile_rows;
        b += tile_cols;
    }
#pragma GCC unroll 16
    for (int r = 0; r < tile_rows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < tile_vectors; ++v) {
            std::memcpy(tile + r * tile_cols + v * vector_floats, &sums[r][v], sizeof(Vector));
        }
    }
}

/// Finishes one row of a tile: adds what earlier slices of k left and, after the last slice, bias
/// and residual, and writes c.
template <class In, class Out>
struct RowFinish {
    Out* c;
    float* sums;  // partial sums; c itself if c is fp32
    const In *bias, *residual;
    bool add_sums, last;

    void operator()(float* row, int64_t cols) const {
        if (add_sums) {
#pragma omp simd
            for (int64_t j = 0; j < cols; ++j) row[j] += sums[j];
        }
        if (!last) {
            std::memcpy(sums, row, static_cast<size_t>(cols) * sizeof(float));
            return;
        }
        if (bias) {
#pragma omp simd
            for (int64_t j = 0; j < cols; ++j) row[j] += to_float(bias[j]);
        }
        if (residual) {
#pragma omp simd
            for (int64_t j = 0; j < cols; ++j) row[j] += to_float(residual[j]);
        }
#pragma omp simd
        for (int64_t j = 0; j < cols; ++j) store(c[j], row[j]);
    }
};

/// Packs `count` rows or columns of an operand into panels of `width`. All threads of a team call
/// it and share the panels; they do not wait for each other at the end.
template <int width, class In>
void pack_panels(float* panels, const In* from, int64_t stride, bool along, int64_t count,
                 int64_t depth) {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < count; i += width) {
        const int64_t filled = std::min<int64_t>(width, count - i);
        if (along) {
            pack_along<width>(panels + i * depth, from + i, stride, filled, depth);
        } else {
            pack_across<width>(panels + i * depth, from + i * stride, stride, filled, depth);
        }
    }
}

template <class In, class Out>
void run(const GemmShape& shape, const GemmOperands& operands, float* scratch) {
    const int64_t M = shape.m, N = shape.n, K = shape.k;
    const bool a_along = shape.op == GemmOp::tn, b_along = shape.op != GemmOp::nt;
    const int64_t lda = shape.lda ? shape.lda : (a_along ? M : K),
                  ldb = shape.ldb ? shape.ldb : (b_along ? N : K), ldc = shape.ldc ? shape.ldc : N;
    const Blocking block(shape);
    float* const a_panels = scratch;
    float* const b_panels = a_panels + block.a_floats();
    float* const block_sums = block.sums ? b_panels + block.b_floats() : nullptr;
    const auto* A = static_cast<const In*>(operands.a);
    const auto* B = static_cast<const In*>(operands.b);
    auto* C = static_cast<Out*>(operands.c);
    const auto* bias = static_cast<const In*>(operands.bias);
    const auto* residual = static_cast<const In*>(operands.residual);

#pragma omp parallel
    for (int64_t col = 0; col < N; col += block.cols) {
        const int64_t cols = std::min(block.cols, N - col);
        for (int64_t row = 0; row < M; row += block.rows) {
            const int64_t rows = std::min(block.rows, M - row);
            for (int64_t k = 0; k < K; k += block.depth) {
                const int64_t depth = std::min(block.depth, K - k);
                const bool first = k == 0, last = k + depth == K;
                // If k has only one slice, the panels of B serve every block of rows.
                if (row == 0 || K > block.depth)
                    pack_panels<tile_cols>(b_panels, B + (b_along ? k * ldb + col : col * ldb + k),
                                           ldb, b_along, cols, depth);
                pack_panels<tile_rows>(a_panels, A + (a_along ? k * lda + row : row * lda + k), lda,
                                       a_along, rows, depth);
#pragma omp barrier
                // Any free thread takes the next group. One thread sums a whole element, so this
                // does not affect the bits.
#pragma omp for collapse(2) schedule(dynamic, 1)
                for (int64_t group_i = 0; group_i < rows; group_i += group_rows) {
                    for (int64_t group_j = 0; group_j < cols; group_j += group_cols) {
                        const int64_t end_i = std::min(group_i + group_rows, rows);
                        const int64_t end_j = std::min(group_j + group_cols, cols);
                        for (int64_t j = group_j; j < end_j; j += tile_cols) {
                            const int64_t width = std::min<int64_t>(tile_cols, cols - j);
                            for (int64_t i = group_i; i < end_i; i += tile_rows) {
                                alignas(64) float tile[tile_rows * tile_cols];
                                multiply_panels(tile, a_panels + i * depth, b_panels + j * depth,
                                                depth);
                                const int64_t height = std::min<int64_t>(tile_rows, rows - i);
                                for (int64_t r = 0; r < height; ++r) {
                                    const int64_t at = (row + i + r) * ldc + col + j;
                                    float* sums = block_sums;
                                    if constexpr (std::is_same_v<Out, float>) {
                                        sums = C + at;
                                    } else if (sums) {
                                        sums += (i + r) * block.cols + j;
                                    }
                                    RowFinish<In, Out>{
                                        C + at,
                                        sums,
                                        bias ? bias + col + j : nullptr,
                                        residual ? residual + at : nullptr,
                                        !first || shape.accumulate,
                                        last,
                                    }(tile + r * tile_cols, width);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

}  // namespace

size_t own_gemm_scratch_bytes(const GemmShape& shape) {
    // Blocks of a larger m can be smaller; the bound for the largest blocks up to m is enough for
    // every smaller m as well.
    Blocking block(shape);
    block.rows = round_up(std::min(shape.m, block_edge), tile_rows);
    return (block.a_floats() + block.b_floats() + block.sum_floats()) * sizeof(float);
}

void own_gemm(const GemmShape& shape, const GemmOperands& operands, void* scratch) {
    assert(shape.m > 0 && shape.n > 0 && shape.k > 0);
    assert(!shape.accumulate || shape.out == DType::fp32);
    assert(!shape.packed && (!shape.residual || !shape.ldc));
    with_float_type(shape.in, [&](auto in) {
        with_float_type(shape.out, [&](auto out) {
            run<decltype(in), decltype(out)>(shape, operands, static_cast<float*>(scratch));
        });
    });
}

}  // namespace train_gpt
