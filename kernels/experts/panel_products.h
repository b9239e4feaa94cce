// Products for one thread on processors with AVX-512, for weights that come from memory and are
// used for few rows: an expert's. A library prepares each product and copies both operands; here
// rows are read where they are, whichever they are, and the next part of the weight is fetched from
// memory while this one is multiplied. After Goto & van de Geijn, "Anatomy of High-Performance
// Matrix Multiplication" (TOMS 2008).
#pragma once
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define TRAIN_GPT_PANELS 1
#else
#define TRAIN_GPT_PANELS 0
#endif

#if TRAIN_GPT_PANELS
#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <utility>

// GCC 11 and 12 warn about the undefined operand inside their own intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "base/dtype.h"
#include "kernels/lanes.h"

namespace train_gpt::panels {

/// Whether products of this dtype are computed here: bf16 needs an instruction of its own, and with
/// AMX a library is faster.
constexpr bool supports(DType dtype) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    return dtype == DType::bf16 || dtype == DType::fp32;
#else
    return dtype == DType::fp32;
#endif
}

constexpr int lanes = 16;
/// The inner loop adds to 6 × 4 vectors: 24 registers, 4 for B and one for A, of 32.
constexpr int tile_rows = 6, tile_vectors = 4, columns = tile_vectors * lanes;
/// The length of a panel: at most 96 KiB, so that several fit into the second-level cache.
constexpr int64_t max_words = 384;
/// Panels of nearly equal length.
constexpr int64_t panel_words(int64_t words) {
    const int64_t panels = (words + max_words - 1) / max_words;
    return panels > 1 ? (words + panels - 1) / panels : words;
}
/// Words after which some lines are asked for.
constexpr int64_t part = 16;
/// Rows of A whose sums are kept while the panels change.
constexpr int64_t max_rows = 42 * tile_rows;

typedef float Vector __attribute__((vector_size(64)));
typedef float VectorAnywhere __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Words __attribute__((vector_size(64), may_alias));
typedef int32_t WordsAnywhere __attribute__((vector_size(64), aligned(2), may_alias));
typedef int32_t Word __attribute__((aligned(2), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t Unsigned __attribute__((vector_size(64)));

/// A word is what one step of a sum reads of an operand: a float, or two bf16.
struct Fp32 {
    using Element = float;
    static constexpr int depth = 1;

    [[gnu::always_inline]] static Vector multiply_add(Vector sum, Word a, Words b) {
        return reinterpret_cast<Vector>(
            _mm512_fmadd_ps(reinterpret_cast<__m512>(_mm512_set1_epi32(a)),
                            reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(sum)));
    }
};
#if defined(__AVX512BF16__)
struct Bf16 {
    using Element = bf16;
    static constexpr int depth = 2;

    [[gnu::always_inline]] static Vector multiply_add(Vector sum, Word a, Words b) {
        return reinterpret_cast<Vector>(_mm512_dpbf16_ps(
            reinterpret_cast<__m512>(sum), (__m512bh)_mm512_set1_epi32(a), (__m512bh)b));
    }
};
template <class T>
using EngineOf = std::conditional_t<std::is_same_v<T, bf16>, Bf16, Fp32>;
#else
template <class T>
using EngineOf = Fp32;
#endif

/// Memory that will be read soon: rows of `bytes`, `stride` apart. Each part of the inner loop asks
/// for a few lines of it.
class Ahead {
  public:
    Ahead() = default;
    Ahead(const void* first, int64_t stride, int64_t bytes, int64_t rows, int lines)
        : row_(static_cast<const char*>(first)),
          stride_(stride),
          bytes_(bytes),
          rows_(rows),
          lines_(lines) {}

    [[gnu::always_inline]] void some() {
        for (int i = 0; i < lines_ && rows_ > 0; ++i) {
            __builtin_prefetch(row_ + at_, 0, 2);
            at_ += 64;
            if (at_ < bytes_) continue;
            // A row that does not begin with a line may end in one more.
            __builtin_prefetch(row_ + bytes_ - 1, 0, 2);
            at_ = 0, row_ += stride_, --rows_;
        }
    }

  private:
    const char* row_ = nullptr;
    int64_t stride_ = 0, bytes_ = 0, rows_ = 0, at_ = 0;
    int lines_ = 0;
};

/// Row i of A has word w at row[i] + w·step. next: null, or rows of step 1 that are multiplied soon
/// and are not in the caches yet.
struct RowsOfA {
    const Word* row[tile_rows];
    int64_t step;
    const Word* next[tile_rows] = {};
};

enum class Sums { overwrite, add, stream };

/// c [rows, columns] = (c +) A·panel over `words` words; panel [words, columns]. stream: c bypasses
/// the caches; its rows are aligned to their lines then.
template <class Engine, int rows, Sums sums, int vectors>
[[gnu::noinline]] void multiply(const RowsOfA& a, const Words* panel, int64_t words, float* c,
                                int64_t ldc, Ahead& ahead) {
    Vector acc[rows][vectors];
#pragma GCC unroll 6
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v)
            acc[i][v] = sums == Sums::add
                            ? *reinterpret_cast<const VectorAnywhere*>(c + i * ldc + v * lanes)
                            : Vector{};
    }
    const Word* row[rows];
    for (int i = 0; i < rows; ++i) row[i] = a.row[i];
    const int64_t step = a.step;
    for (int64_t first = 0, at = 0; first < words; first += part) {
        const int64_t count = std::min(part, words - first);
#pragma GCC unroll 1
        for (int64_t w = 0; w < count; ++w) {
            Words b[vectors];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                Words loaded = panel[v];
                asm("" : "+v"(loaded));  // once, not for each multiplication
                b[v] = loaded;
            }
#pragma GCC unroll 6
            for (int i = 0; i < rows; ++i) {
                const Word x = row[i][at];
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v)
                    acc[i][v] = Engine::multiply_add(acc[i][v], x, b[v]);
            }
            panel += tile_vectors;
            at += step;
        }
        ahead.some();
        if (a.next[0])
            for (const Word* next_row : a.next) __builtin_prefetch(next_row + first);
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            float* const to = c + i * ldc + v * lanes;
            if (sums == Sums::stream)
                _mm512_stream_ps(to, reinterpret_cast<__m512>(acc[i][v]));
            else
                *reinterpret_cast<VectorAnywhere*>(to) = acc[i][v];
        }
    }
}

template <class Engine, Sums sums, int vectors = tile_vectors, class... Args>
void multiply_some(int64_t rows, Args&&... args) {
    switch (rows) {
        case 1:
            return multiply<Engine, 1, sums, vectors>(args...);
        case 2:
            return multiply<Engine, 2, sums, vectors>(args...);
        case 3:
            return multiply<Engine, 3, sums, vectors>(args...);
        case 4:
            return multiply<Engine, 4, sums, vectors>(args...);
        case 5:
            return multiply<Engine, 5, sums, vectors>(args...);
        default:
            return multiply<Engine, 6, sums, vectors>(args...);
    }
}

/// The same for a panel of which the first `filled` columns count.
template <class Engine, Sums sums, class... Args>
void multiply_filled(int64_t filled, int64_t rows, Args&&... args) {
    if (filled <= columns / 2)
        multiply_some<Engine, sums, tile_vectors / 2>(rows, args...);
    else
        multiply_some<Engine, sums>(rows, args...);
}

// --- Packing -------------------------------------------------------------------------------------

/// One word of each of 16 columns: elements of one row, or of two rows interleaved (null: zeros).
[[gnu::always_inline]] inline void pack_vector(Words* to, const float* row, const float*) {
    *to = *reinterpret_cast<const WordsAnywhere*>(row);
}
[[gnu::always_inline]] inline void pack_vector(Words* to, const bf16* row, const bf16* next) {
    const auto wide = [](const bf16* from) {
        return __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Unsigned);
    };
    const Unsigned low = wide(row);
    *to = reinterpret_cast<Words>(next ? low | wide(next) << 16 : low);
}
[[gnu::always_inline]] inline int32_t word_of(const float* row, const float*) {
    return std::bit_cast<int32_t>(*row);
}
[[gnu::always_inline]] inline int32_t word_of(const bf16* row, const bf16* next) {
    return static_cast<int32_t>(row->bits | (next ? uint32_t{next->bits} << 16 : 0));
}

/// Packs rows: word w of column j of `width` has the elements j of rows depth·w … of `count`.
/// row(d): where row d begins. width: a multiple of lanes; columns from `cols` on are zeros.
template <class Element, int64_t width, class Row>
void pack_rows(Words* to, int64_t cols, int64_t count, Row&& row) {
    constexpr int depth = EngineOf<Element>::depth;
    constexpr int64_t vectors = width / lanes;
    for (int64_t d = 0; d < count; d += depth) {
        const Element *one = row(d), *next = d + depth - 1 < count ? row(d + depth - 1) : nullptr;
        Words* const line = to + d / depth * vectors;
        if (cols == width && next) {
#pragma GCC unroll 4
            for (int64_t v = 0; v < vectors; ++v)
                pack_vector(line + v, one + v * lanes, next + v * lanes);
            continue;
        }
        int64_t j = 0;
        for (; j + lanes <= cols; j += lanes)
            pack_vector(line + j / lanes, one + j, next ? next + j : nullptr);
        auto* const words = reinterpret_cast<Word*>(line);
        for (; j < cols; ++j) words[j] = word_of(one + j, next ? next + j : nullptr);
        for (; j < width; ++j) words[j] = 0;
    }
}

template <int step, bool high, int... lane>
[[gnu::always_inline]] inline Words exchange(Words a, Words b,
                                             std::integer_sequence<int, lane...>) {
    constexpr auto source = [](int l) {
        return l % (2 * step) < step ? (high ? l + step : l)
                                     : (high ? lanes + l : lanes + l - step);
    };
#if defined(__clang__)
    return __builtin_shufflevector(a, b, source(lane)...);
#else
    return __builtin_shuffle(a, b, Words{source(lane)...});
#endif
}

/// Transposes a square of words, one bit of the indices (row, lane) at a time.
template <int step = lanes / 2>
[[gnu::always_inline]] inline void transpose(Words (&rows)[lanes]) {
    constexpr std::make_integer_sequence<int, lanes> all;
#pragma GCC unroll 16
    for (int r = 0; r < lanes; ++r) {
        if (r & step) continue;
        const Words a = rows[r], b = rows[r + step];
        rows[r] = exchange<step, false>(a, b, all);
        rows[r + step] = exchange<step, true>(a, b, all);
    }
    if constexpr (step > 1) transpose<step / 2>(rows);
}

/// Packs columns: word w of column j of a panel is word w of row j of `from` (ld in words); `cols`
/// rows, the others are zeros.
inline void pack_columns(Words* to, const Word* from, int64_t ld, int64_t cols, int64_t words) {
    for (int64_t first = 0; first < columns; first += lanes) {
        const int64_t count = std::clamp<int64_t>(cols - first, 0, lanes);
        const Word* const rows = from + first * ld;
        int64_t w = 0;
        if (count == lanes) {
            for (; w + lanes <= words; w += lanes) {
                Words square[lanes];
#pragma GCC unroll 16
                for (int l = 0; l < lanes; ++l)
                    square[l] = *reinterpret_cast<const WordsAnywhere*>(rows + l * ld + w);
                transpose(square);
#pragma GCC unroll 16
                for (int l = 0; l < lanes; ++l)
                    to[(w + l) * tile_vectors + first / lanes] = square[l];
            }
        }
        for (; w < words; ++w) {
            auto* const line = reinterpret_cast<Word*>(to + w * tile_vectors + first / lanes);
            for (int64_t l = 0; l < lanes; ++l) line[l] = l < count ? rows[l * ld + w] : 0;
        }
    }
}

// --- Products ------------------------------------------------------------------------------------

/// out [rows, cols] = A·B (+ bias). Row r of A is depth·words elements at a(r); rows <= max_rows.
/// B: `transposed`: [cols, ldb], else [depth·words, ldb]; out [rows, ldo]. next_b: a B that this
/// thread is likely to need next, or null.
template <class Element>
struct RowProduct {
    Element* out;
    const Element *b, *bias, *next_b;
    int64_t rows, cols, words, ldb, ldo;
    bool transposed;
};

/// Panels and sums of a thread: two panels, and the sums of max_rows rows for their columns.
constexpr int64_t group_columns = 2 * columns;
constexpr size_t row_product_bytes =
    static_cast<size_t>(max_words * group_columns + max_rows * group_columns) * sizeof(float);

template <class Element, class A>
void multiply_rows(const RowProduct<Element>& p, A&& a, void* scratch) {
    using Engine = EngineOf<Element>;
    constexpr int depth = Engine::depth;
    auto* const panels = static_cast<Words*>(scratch);
    float* const sums = reinterpret_cast<float*>(panels + max_words * group_columns / lanes);
    // Where the part of B at (col, word) begins.
    const auto part_of_b = [&](int64_t col, int64_t word) {
        return p.transposed ? p.b + col * p.ldb + word * depth : p.b + word * depth * p.ldb + col;
    };
    const int64_t panel = panel_words(p.words);
    // Each panel has 4 lines for a word; they are asked for during the products of the part before.
    const int64_t tiles = (p.rows + tile_rows - 1) / tile_rows;
    const int lines = static_cast<int>((part * tile_vectors + tiles - 1) / tiles);
    const auto prefetch_of = [&](int64_t col, int64_t word) {
        const bool is_next = col >= p.cols;
        if (is_next && !p.next_b) return Ahead();
        const int64_t cols = std::min(group_columns, is_next ? p.cols : p.cols - col),
                      words = std::min(panel, p.words - word),
                      size = static_cast<int64_t>(sizeof(Element));
        const Element* const first = is_next ? p.next_b : part_of_b(col, word);
        return p.transposed ? Ahead(first, p.ldb * size, words * depth * size, cols, lines)
                            : Ahead(first, p.ldb * size, cols * size, words * depth, lines);
    };

    for (int64_t col = 0; col < p.cols; col += group_columns) {
        const int64_t cols = std::min(group_columns, p.cols - col);
        for (int64_t word = 0; word < p.words; word += panel) {
            const int64_t words = std::min(panel, p.words - word);
            const bool first = word == 0, last = word + words == p.words;
            for (int64_t j = 0; j < cols; j += columns) {
                Words* const packed = panels + j / lanes * max_words;
                const int64_t filled = std::min<int64_t>(columns, cols - j);
                const Element* const from = part_of_b(col + j, word);
                if (p.transposed)
                    pack_columns(packed, reinterpret_cast<const Word*>(from), p.ldb / depth, filled,
                                 words);
                else
                    pack_rows<Element, columns>(packed, filled, words * depth,
                                                [&](int64_t d) { return from + d * p.ldb; });
            }
            Ahead ahead =
                last ? prefetch_of(col + group_columns, 0) : prefetch_of(col, word + words);
            for (int64_t r = 0; r < p.rows; r += tile_rows) {
                const int64_t here = std::min<int64_t>(tile_rows, p.rows - r);
                const auto row_at = [&](int64_t i) {
                    return reinterpret_cast<const Word*>(a(std::min(i, p.rows - 1))) + word;
                };
                RowsOfA rows{{}, 1};
                for (int64_t i = 0; i < tile_rows; ++i) {
                    rows.row[i] = row_at(r + i);
                    if (col == 0) rows.next[i] = row_at(r + tile_rows + i);
                }
                for (int64_t j = 0; j < cols; j += columns) {
                    if (j > 0) rows.next[0] = nullptr;
                    const Words* const packed = panels + j / lanes * max_words;
                    float* const c = sums + r * group_columns + j;
                    if (first)
                        multiply_filled<Engine, Sums::overwrite>(cols - j, here, rows, packed,
                                                                 words, c, group_columns, ahead);
                    else
                        multiply_filled<Engine, Sums::add>(cols - j, here, rows, packed, words, c,
                                                           group_columns, ahead);
                }
                if (!last) continue;
                for (int64_t i = r; i < r + here; ++i) {
                    const float* const row = sums + i * group_columns;
                    Element* const out = p.out + i * p.ldo + col;
                    if (p.bias) {
                        const Element* const bias = p.bias + col;
#pragma omp simd
                        for (int64_t j = 0; j < cols; ++j)
                            store(out[j], row[j] + to_float(bias[j]));
                    } else {
#pragma omp simd
                        for (int64_t j = 0; j < cols; ++j) store(out[j], row[j]);
                    }
                }
            }
        }
    }
}

/// dw [n, k] (+)= Σ_r dy(r)ᵀ·x(r) over `rows` rows; n <= most_n, k <= most_k. stream: dw is aligned
/// to cache lines, as each of its rows is, and is better not kept in the caches.
struct SumProduct {
    float* dw;
    int64_t rows, n, k, ld;
    bool accumulate, stream;
};
constexpr int64_t most_n = 240, most_k = 256;
static_assert(most_n % tile_rows == 0 && most_n % lanes == 0 && most_k % columns == 0);
constexpr size_t sum_product_bytes =
    static_cast<size_t>(max_words * (most_n + most_k) + tile_rows * columns) * sizeof(float);

template <class Element, class Dy, class X>
void add_products(const SumProduct& p, Dy&& dy, X&& x, void* scratch) {
    using Engine = EngineOf<Element>;
    constexpr int64_t max_depth = max_words * Engine::depth;
    auto* const a_words = static_cast<Words*>(scratch);
    Words* const panels = a_words + max_words * most_n / lanes;
    float* const ragged = reinterpret_cast<float*>(panels + max_words * most_k / lanes);
    Ahead nothing;
    const bool streams = p.stream && !p.accumulate && p.rows <= max_depth;
    for (int64_t first = 0; first < p.rows; first += max_depth) {
        const int64_t count = std::min(max_depth, p.rows - first),
                      words = (count + Engine::depth - 1) / Engine::depth;
        const bool add = p.accumulate || first > 0;
        pack_rows<Element, most_n>(a_words, p.n, count, [&](int64_t r) { return dy(first + r); });
        for (int64_t j = 0; j < p.k; j += columns)
            pack_rows<Element, columns>(panels + j / lanes * max_words,
                                        std::min<int64_t>(columns, p.k - j), count,
                                        [&](int64_t r) { return x(first + r) + j; });
        for (int64_t i = 0; i < p.n; i += tile_rows) {
            const int64_t here = std::min<int64_t>(tile_rows, p.n - i);
            RowsOfA rows{{}, most_n};
            for (int64_t r = 0; r < here; ++r)
                rows.row[r] = reinterpret_cast<const Word*>(a_words) + i + r;
            for (int64_t j = 0; j < p.k; j += columns) {
                const Words* const panel = panels + j / lanes * max_words;
                const int64_t cols = std::min<int64_t>(columns, p.k - j);
                float* const c = p.dw + i * p.ld + j;
                if (cols == columns) {
                    if (add)
                        multiply_some<Engine, Sums::add>(here, rows, panel, words, c, p.ld,
                                                         nothing);
                    else if (streams)
                        multiply_some<Engine, Sums::stream>(here, rows, panel, words, c, p.ld,
                                                            nothing);
                    else
                        multiply_some<Engine, Sums::overwrite>(here, rows, panel, words, c, p.ld,
                                                               nothing);
                    continue;
                }
                multiply_filled<Engine, Sums::overwrite>(cols, here, rows, panel, words, ragged,
                                                         int64_t{columns}, nothing);
                for (int64_t r = 0; r < here; ++r)
                    for (int64_t l = 0; l < cols; ++l)
                        c[r * p.ld + l] = add ? c[r * p.ld + l] + ragged[r * columns + l]
                                              : ragged[r * columns + l];
            }
        }
    }
    if (streams) _mm_sfence();  // other threads see what bypassed the caches
}

}  // namespace train_gpt::panels
#endif
