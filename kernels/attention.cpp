// Causal attention on the CPU, in tiles that stay in the first two levels of cache.
//
// Work is cut into blocks of up to 256 queries of one head, and these into tiles of 64 queries × 64
// keys. Every product of a tile is one of two register-blocked micro-kernels over packed operands:
//   rows:     C[m, n] = Σ_k A[m, k]·B[k, n]    S = Q·Kᵀ, dP = dO·Vᵀ, O += P·V, dQ += dS·K
//   columns:  C[m, n] = Σ_k A[k, m]·B[k, n]    dV += Pᵀ·dO, dK += dSᵀ·Q
// Vectors run along n; A is broadcast element by element. "Packed" means: contiguous, zero-padded,
// and for fp32 nothing else. With AVX512_BF16 an operand is made of 32-bit words that each hold two
// bf16 neighbours along k, which is what the dot-product instruction multiplies; P and dS are
// rounded to bf16 for it. Everything else is fp32.
//
// Each element of a result is one chain of fused multiply-adds in the order of k, whoever computes
// it: the bits depend neither on the number of threads nor on how blocks are shared among them.
//
// A product covers whole panels of queries and, at document boundaries, whole tiles, with P = 0
// where a query does not see a key: a NaN or an infinity also reaches such neighbours (0·∞ = NaN).
#include "kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include <omp.h>

#if defined(__AVX512F__)
// GCC 11 and 12 take the undefined operand inside their own intrinsics for a mistake.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "base/error.h"
#include "device/profile.h"

// Processors with AMX run the bf16 dot product at half the rate of fp32 multiply-adds; the others
// at twice that rate.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && \
    !defined(__AMX_BF16__)
#define TRAIN_GPT_BF16_PAIRS 1
#else
#define TRAIN_GPT_BF16_PAIRS 0
#endif

namespace train_gpt {
namespace {

// ----------------------------------------------------------------------------------------- vectors

// lanes: floats in a vector. max_columns: vectors in a row of a micro-kernel's accumulator; with 16
// registers, 4 × 3 accumulators, 3 vectors of B and one of A take all of them.
#if defined(__AVX512F__)
constexpr int lanes = 16, max_columns = 4;
#elif defined(__AVX__)
constexpr int lanes = 8, max_columns = 3;
#elif defined(__aarch64__)
constexpr int lanes = 4, max_columns = 4;
#else
constexpr int lanes = 4, max_columns = 3;
#endif

typedef float vfloat __attribute__((vector_size(lanes * 4), may_alias));
typedef int32_t vint __attribute__((vector_size(lanes * 4), may_alias));
typedef float vfloat_unaligned __attribute__((vector_size(lanes * 4), aligned(4), may_alias));
typedef uint16_t vhalf_unaligned __attribute__((vector_size(lanes * 2), aligned(2), may_alias));
typedef uint32_t vuint __attribute__((vector_size(lanes * 4), may_alias));
typedef int32_t word_bits __attribute__((may_alias));

inline vfloat load(const float* p) { return *reinterpret_cast<const vfloat*>(p); }
inline void store(float* p, vfloat v) { *reinterpret_cast<vfloat*>(p) = v; }
inline vfloat all(float x) { return vfloat{} + x; }

inline vfloat load_unaligned(const float* p) {
    return *reinterpret_cast<const vfloat_unaligned*>(p);
}
inline vfloat load_unaligned(const bf16* p) {
    const auto half = *reinterpret_cast<const vhalf_unaligned*>(p);
    return reinterpret_cast<vfloat>(__builtin_convertvector(half, vuint) << 16);
}

/// A NaN in a is ignored, a NaN in b is not: max(limit, x) keeps it.
inline vfloat max(vfloat a, vfloat b) {
#if defined(__AVX512F__)
    return reinterpret_cast<vfloat>(
        _mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
    return a > b ? a : b;
#endif
}

template <int... I>
vint make_iota(std::integer_sequence<int, I...>) {
    return vint{I...};
}
inline vint iota() { return make_iota(std::make_integer_sequence<int, lanes>{}); }

/// Transposes one bit of (row, lane) between rows a and b = a + step: the low result holds a's
/// lanes with that bit clear and, in the lanes where it is set, b's; the high result holds what is
/// left.
template <int step, bool high, int... I>
inline vfloat exchange(vfloat a, vfloat b, std::integer_sequence<int, I...>) {
    constexpr auto source = [](int lane) {
        return lane % (2 * step) < step ? (high ? lane + step : lane)
                                        : (high ? lanes + lane : lanes + lane - step);
    };
#if defined(__clang__)
    return __builtin_shufflevector(a, b, source(I)...);
#else
    return __builtin_shuffle(a, b, vint{source(I)...});
#endif
}
template <int step, bool high>
inline vfloat exchange(vfloat a, vfloat b) {
    return exchange<step, high>(a, b, std::make_integer_sequence<int, lanes>{});
}

template <int step = lanes / 2>
[[gnu::always_inline]] inline void transpose(vfloat (&rows)[lanes]) {
#pragma GCC unroll 16
    for (int r = 0; r < lanes; ++r) {
        if (r & step) continue;
        const vfloat a = rows[r], b = rows[r + step];
        rows[r] = exchange<step, false>(a, b);
        rows[r + step] = exchange<step, true>(a, b);
    }
    if constexpr (step > 1) transpose<step / 2>(rows);
}

/// Lane i of the result combines all lanes of rows[i].
template <int step = lanes / 2, class Combine>
[[gnu::always_inline]] inline vfloat reduce_rows(vfloat (&rows)[lanes], Combine combine) {
#pragma GCC unroll 16
    for (int r = 0; r < step; ++r) {
        const vfloat a = rows[r], b = rows[r + step];
        rows[r] = combine(exchange<step, false>(a, b), exchange<step, true>(a, b));
    }
    if constexpr (step > 1) return reduce_rows<step / 2>(rows, combine);
    return rows[0];
}
constexpr auto take_sum = [](vfloat a, vfloat b) { return a + b; };
constexpr auto take_max = [](vfloat a, vfloat b) { return max(a, b); };

constexpr float log2_e = 1.44269504088896341f, ln_2 = 0.693147180559945309f;
constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

/// 2^x, 0 for x < −126, NaN for a NaN; meant for x <= 127. Exact at integers. x = n + r with
/// integer n, |r| <= ½, and 2^r = 1 + r·P(r) with the polynomial whose largest relative error is
/// least: 9·10⁻⁸ (degree 5 in r), or 3·10⁻⁶ (degree 4) where the result is about to be rounded to
/// bf16.
template <bool coarse>
[[gnu::always_inline]] inline vfloat exp2(vfloat x) {
#if defined(__AVX512F__)
    const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-200.0f), reinterpret_cast<__m512>(x));
    const __m512 whole =
        _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vfloat r = reinterpret_cast<vfloat>(_mm512_sub_ps(bounded, whole));
#else
    constexpr float round_to_integer = 12582912.0f;  // 1.5·2²³: its last place is 1
    const vfloat shifted = x + round_to_integer;
    const vfloat r = x - (shifted - round_to_integer);
#endif
    vfloat p;
    if constexpr (coarse) {
        p = all(0.009582852944731712f);
        p = p * r + 0.055906426161527634f;
        p = p * r + 0.24024099111557007f;
        p = p * r + 0.6931241750717163f;
    } else {
        p = all(0.001326472731307149f);
        p = p * r + 0.009671512991189957f;
        p = p * r + 0.05550733581185341f;
        p = p * r + 0.24022242426872253f;
        p = p * r + 0.6931470036506653f;
    }
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    return reinterpret_cast<vfloat>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), whole));
#else
    // A product, not a sum of exponents, so that a NaN stays one whatever its bits are.
    const vfloat power = reinterpret_cast<vfloat>((reinterpret_cast<vint>(shifted) + 127) << 23);
    return x < -126.0f ? vfloat{} : p * power;
#endif
}

// ----------------------------------------------------------------------------------- micro-kernels

/// Rows of a micro-kernel's accumulator. It divides the tile and the vector length, so that a panel
/// of four rows never straddles a vector of keys that was not computed.
constexpr int panel = 4;

/// Operands as plain floats.
struct Fp32 {
    using Element = float;
    using Word = float;              // what one step of the summed dimension reads
    static constexpr int depth = 1;  // elements of the summed dimension in a word
    using Vector = vfloat;

    [[gnu::always_inline]] static void multiply_add(vfloat& acc, Word a, Vector b) { acc += a * b; }
};

#if TRAIN_GPT_BF16_PAIRS
/// Operands as pairs of bf16.
struct Bf16Pairs {
    using Element = bf16;
    using Word = word_bits;
    static constexpr int depth = 2;
    using Vector = vint;

    [[gnu::always_inline]] static void multiply_add(vfloat& acc, Word a, Vector b) {
        acc = reinterpret_cast<vfloat>(_mm512_dpbf16_ps(
            reinterpret_cast<__m512>(acc), (__m512bh)_mm512_set1_epi32(a), (__m512bh)b));
    }
};
#endif

/// Compilers like to read a row of B anew for each multiply-add that uses it, which makes loads the
/// limit.
template <class Vector>
[[gnu::always_inline]] inline void keep_in_register(Vector& x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#elif defined(__SSE2__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
}

enum class A { rows, columns };      // how the broadcast operand lies: A[m, k] or A[k, m]
enum class C { scale, accumulate };  // C = factor·A·B, or C = factor[m]·C + A·B

/// One panel of C: 4 rows by N vectors. Strides in words (a, b) and floats (c).
template <class Engine, A order, C update, int N>
[[gnu::noinline]] void multiply_panel(int words, const typename Engine::Word* a, ptrdiff_t a_stride,
                                      const typename Engine::Word* b, ptrdiff_t b_stride, float* c,
                                      ptrdiff_t c_stride, const float* factor) {
    vfloat acc[panel][N];
#pragma GCC unroll 4
    for (int m = 0; m < panel; ++m) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            if constexpr (update == C::scale) {
                acc[m][n] = vfloat{};
            } else {
                acc[m][n] = load(c + m * c_stride + n * lanes) * (factor ? factor[m] : 1.0f);
            }
        }
    }
#pragma GCC unroll 1
    for (int k = 0; k < words; ++k) {
        typename Engine::Vector row[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            row[n] = *reinterpret_cast<const typename Engine::Vector*>(b + n * lanes);
            keep_in_register(row[n]);
        }
#pragma GCC unroll 4
        for (int m = 0; m < panel; ++m) {
            const auto x = order == A::rows ? a[m * a_stride] : a[m];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) Engine::multiply_add(acc[m][n], x, row[n]);
        }
        a += order == A::rows ? 1 : a_stride;
        b += b_stride;
    }
#pragma GCC unroll 4
    for (int m = 0; m < panel; ++m) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            store(c + m * c_stride + n * lanes,
                  update == C::scale ? acc[m][n] * *factor : acc[m][n]);
        }
    }
}

template <class Engine, A order, C update, class... Args>
inline void multiply_columns(int columns, Args... args) {
    switch (columns) {
        case 1:
            return multiply_panel<Engine, order, update, 1>(args...);
        case 2:
            return multiply_panel<Engine, order, update, 2>(args...);
        case 3:
            return multiply_panel<Engine, order, update, 3>(args...);
        default:
            return multiply_panel<Engine, order, update, max_columns>(args...);
    }
}

// -------------------------------------------------------------------------------------- tile sizes

// Queries and keys of a tile: a 64 × 64 operand is half of a first-level cache of 32 KiB.
constexpr int tile = 64;
// Queries that share one packing of the keys: with 64 columns, 64 KiB per operand, all of them in
// the second-level cache.
constexpr int block_rows = 256;
constexpr int max_head = 256;
static_assert(tile % lanes == 0 && tile % panel == 0 && lanes % panel == 0 &&
              block_rows % tile == 0);

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
int padded_head(int D) { return static_cast<int>(round_up(D, lanes)); }

// ------------------------------------------------------------------------------------- prefetching

template <class T>
inline T* at(const HeadsView& view, int64_t b, int64_t t, int64_t h) {
    return static_cast<T*>(view.data) + b * view.batch + t * view.token + h * view.head;
}

/// Rows of the tensors that will be read or written soon. A head's rows lie far apart, where no
/// hardware prefetcher follows; brought into the second-level cache a few with each panel of a
/// product, they cost nothing. What was added last is wanted first. Only a hint: what does not fit
/// is forgotten.
class Prefetch {
  public:
    template <class Storage>
    void add(const HeadsView& view, int64_t b, int64_t t, int64_t h, int64_t rows, int D) {
        if (count_ == capacity || rows <= 0) return;
        parts_[count_++] = {reinterpret_cast<const char*>(at<const Storage>(view, b, t, h)),
                            view.token * static_cast<int64_t>(sizeof(Storage)), rows,
                            D * static_cast<int>(sizeof(Storage))};
    }

    void some() {
        for (int i = 0; i < rows_at_once && count_ > 0; ++i) {
            Part& part = parts_[count_ - 1];
            for (int offset = 0; offset < part.bytes; offset += 64)
                __builtin_prefetch(part.row + offset, 0, 2);
            __builtin_prefetch(part.row + part.bytes - 1, 0, 2);
            part.row += part.stride;
            if (--part.rows == 0) --count_;
        }
    }

  private:
    static constexpr int capacity = 16;
    // A block's products have about a third as many panels as it touches rows.
    static constexpr int rows_at_once = 4;
    struct Part {
        const char* row;
        int64_t stride, rows;
        int bytes;
    };
    Part parts_[capacity];
    int count_ = 0;
};

// ----------------------------------------------------------------------------------------- packing

inline void convert(float* dst, const float* src, int n) {
    std::memcpy(dst, src, sizeof(float) * static_cast<size_t>(n));
}
inline void convert(bf16* dst, const bf16* src, int n) {
    std::memcpy(dst, src, sizeof(bf16) * static_cast<size_t>(n));
}
inline void convert(float* dst, const bf16* src, int n) {
    for (int i = 0; i < n; ++i) dst[i] = to_float(src[i]);
}

/// dst[r, 0..padded) = src[r·stride + 0..D), zeros in the padding and in the rows from `rows` up to
/// `padded_rows`.
template <class Element, class Storage>
void pack_rows(Element* dst, int padded, const Storage* src, int64_t stride, int rows,
               int padded_rows, int D) {
    for (int r = 0; r < rows; ++r, dst += padded, src += stride) {
        convert(dst, src, D);
        if (D < padded)
            std::memset(static_cast<void*>(dst + D), 0,
                        sizeof(Element) * static_cast<size_t>(padded - D));
    }
    if (rows < padded_rows) {
        const size_t rest = static_cast<size_t>(padded_rows - rows) * static_cast<size_t>(padded);
        std::memset(static_cast<void*>(dst), 0, sizeof(Element) * rest);
    }
}

/// dst[k, r] = src[r, k] in words, for a tile of keys: B of a product over the head dimension. dst
/// rows are `tile` wide.
void pack_transposed(float* dst, const float* src, int words, int keys) {
    for (int r = 0; r < keys; r += lanes) {
        for (int k = 0; k < words; k += lanes) {
            vfloat square[lanes];
            // Pairs: words is half of the padded head size, a multiple of lanes / 2.
            const int depth = std::min(lanes, words - k);
#pragma GCC unroll 16
            for (int i = 0; i < lanes; ++i) square[i] = load_unaligned(src + (r + i) * words + k);
            transpose(square);
            for (int i = 0; i < depth; ++i) store(dst + (k + i) * tile + r, square[i]);
        }
    }
}

/// B of a product over rows. Plain floats are that already.
inline const float* pack_depth(float*, const float* src, int, int) { return src; }

#if TRAIN_GPT_BF16_PAIRS
/// Word i holds lane i of two vectors, rounded to bf16: `low` in its lower half.
[[gnu::always_inline]] inline __m512i pair_up(vfloat low, vfloat high) {
    const __m512i halves =
        (__m512i)_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low));
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, halves);
}

/// dst[r / 2, n] = (src[r, n], src[r + 1, n]) for even r.
const bf16* pack_depth(bf16* dst, const bf16* src, int rows, int padded) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    bf16* out = dst;
    for (int r = 0; r < rows; r += 2, src += 2 * padded) {
        for (int n = 0; n < padded; n += lanes, out += 2 * lanes) {
            const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + n));
            const __m256i high =
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + padded + n));
            const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
            _mm512_store_si512(out, _mm512_permutexvar_epi16(order, both));
        }
    }
    return dst;
}
#endif

template <class Storage>
inline void write_row(Storage* __restrict dst, const float* __restrict src, float factor, int D) {
    for (int d = 0; d < D; ++d) dst[d] = Storage(src[d] * factor);
}
template <class Storage>
void write_rows(Storage* dst, int64_t stride, const float* src, int padded, float factor, int rows,
                int D) {
    for (int r = 0; r < rows; ++r) write_row(dst + r * stride, src + r * padded, factor, D);
}

/// dst[r] = Σ_d a[r, d]·b[r, d]
template <class Storage>
void row_products(float* dst, const Storage* a, int64_t a_stride, const Storage* b,
                  int64_t b_stride, int rows, int D) {
    for (int r0 = 0; r0 < rows; r0 += lanes) {
        const int count = std::min(lanes, rows - r0);
        vfloat sums[lanes] = {};
        alignas(64) float rest[lanes] = {}, total[lanes];
        for (int i = 0; i < count; ++i) {
            const Storage* x = a + (r0 + i) * a_stride;
            const Storage* y = b + (r0 + i) * b_stride;
            int d = 0;
            for (; d + lanes <= D; d += lanes)
                sums[i] += load_unaligned(x + d) * load_unaligned(y + d);
            for (; d < D; ++d) rest[i] += to_float(x[d]) * to_float(y[d]);
        }
        store(total, reduce_rows(sums, take_sum));
        for (int i = 0; i < count; ++i) dst[r0 + i] = total[i] + rest[i];
    }
}

// ----------------------------------------------------------------------------------------- scratch

/// Hands out 64-byte aligned pieces of one thread's share; over a null base it only counts.
class Pieces {
  public:
    explicit Pieces(char* base) : base_(base) {}

    template <class T>
    T* take(int64_t count) {
        // Two extra lines keep buffers whose sizes are powers of two from meeting in the same sets
        // of the cache.
        const size_t start = used_;
        used_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64)) + 128;
        return base_ ? reinterpret_cast<T*>(base_ + start) : nullptr;
    }
    size_t used() const { return static_cast<size_t>(round_up(static_cast<int64_t>(used_), 64)); }

  private:
    char* base_;
    size_t used_ = 0;
};

int block_height(int T) {
    return static_cast<int>(std::min<int64_t>(block_rows, round_up(T, lanes)));
}

template <class Engine>
struct ForwardScratch {
    using Element = typename Engine::Element;
    Element *q, *key_rows, *key_columns, *values;
    float *out, *scores, *row_max, *row_sum, *rescale;

    ForwardScratch(Pieces& pieces, const AttentionShape& shape) {
        const int64_t rows = block_height(shape.T), head = padded_head(shape.D);
        q = pieces.take<Element>(rows * head);
        key_rows = pieces.take<Element>(tile * head + lanes);
        key_columns = pieces.take<Element>(tile * head);
        values = pieces.take<Element>(tile * head);
        out = pieces.take<float>(rows * head);
        scores = pieces.take<float>(tile * tile);
        row_max = pieces.take<float>(rows);
        row_sum = pieces.take<float>(rows * lanes);
        rescale = pieces.take<float>(tile);
    }
};

template <class Engine>
struct BackwardScratch {
    using Element = typename Engine::Element;
    Element *q, *q_deep, *dout, *dout_deep, *key_rows, *key_columns, *keys_deep, *value_rows,
        *value_columns;
    Element *p_columns, *ds_rows, *ds_columns;
    float *dq, *dk, *dv, *scores, *dp, *delta, *lse;

    /// keys: how many of them get their gradients from one thread at once.
    BackwardScratch(Pieces& pieces, const AttentionShape& shape, int64_t keys) {
        constexpr bool paired = Engine::depth > 1;
        const int64_t rows = block_height(shape.T), head = padded_head(shape.D);
        q = pieces.take<Element>(rows * head);
        dout = pieces.take<Element>(rows * head);
        q_deep = pieces.take<Element>(paired ? rows * head : 0);
        dout_deep = pieces.take<Element>(paired ? rows * head : 0);
        dq = pieces.take<float>(rows * head);
        key_rows = pieces.take<Element>(tile * head + lanes);
        key_columns = pieces.take<Element>(tile * head);
        keys_deep = pieces.take<Element>(paired ? tile * head : 0);
        value_rows = pieces.take<Element>(tile * head + lanes);
        value_columns = pieces.take<Element>(tile * head);
        scores = pieces.take<float>(tile * tile);
        dp = pieces.take<float>(tile * tile);
        p_columns = pieces.take<Element>(paired ? tile * tile : 0);
        ds_rows = pieces.take<Element>(paired ? tile * tile : 0);
        ds_columns = pieces.take<Element>(paired ? tile * tile : 0);
        delta = pieces.take<float>(rows);
        lse = pieces.take<float>(rows);
        dk = pieces.take<float>(round_up(keys, tile) * head);
        dv = pieces.take<float>(round_up(keys, tile) * head);
    }
};

// -------------------------------------------------------------------------------------- visibility

/// Which keys of a tile the queries of a tile see: query row r sees keys [first(r), end(r)) of the
/// tile.
struct Visibility {
    int64_t position;  // of row 0, minus the tile's first key
    int rows;          // real rows; those behind them are padding and take the last one's part
    int keys;          // real keys of the tile
    const int32_t* doc_start;  // of row 0, or null
    int64_t key0;

    int end(int r) const {
        return static_cast<int>(std::clamp<int64_t>(position + std::min(r, rows - 1) + 1, 0, keys));
    }
    int first(int r) const {
        if (!doc_start) return 0;
        return static_cast<int>(
            std::clamp<int64_t>(doc_start[std::min(r, rows - 1)] - key0, 0, tile));
    }
    /// Keys that rows [r, r + panel) see, in whole vectors.
    int vectors(int r) const { return (end(r + panel - 1) + lanes - 1) / lanes; }
    /// The first row that sees `key`, were it not for documents.
    int first_row(int key) const { return static_cast<int>(std::max<int64_t>(0, key - position)); }

    bool empty() const {
        if (end(rows - 1) == 0) return true;
        if (!doc_start) return false;
        for (int r = 0; r < rows; ++r) {
            if (first(r) < end(r)) return false;
        }
        return true;
    }
};

/// The mask of vector v of a row that sees keys [first, end).
[[gnu::always_inline]] inline vint sees(int v, int first, int end) {
    const vint key = iota() + v * lanes;
    return (key >= first) & (key < end);
}

/// The first key that any of a block's queries sees.
int64_t first_key(const AttentionShape& shape, int64_t b, int64_t t0, int rows) {
    if (!shape.doc_start) return 0;
    const int32_t* start = shape.doc_start + b * shape.T + t0;
    return *std::min_element(start, start + rows);
}

// ----------------------------------------------------------------------------------------- forward

/// c = factor·(a·b) for the vectors of each panel that someone sees: scores, or dP. `words` spans
/// the head dimension.
template <class Engine>
void multiply_visible(const Visibility& view, int rows, int words,
                      const typename Engine::Element* a, const typename Engine::Element* b,
                      float* c, float factor, Prefetch& prefetch) {
    using Word = const typename Engine::Word;
    for (int v = 0; v < tile / lanes; v += max_columns) {
        for (int r = 0; r < rows; r += panel) {
            const int columns = std::min(max_columns, view.vectors(r) - v);
            if (columns <= 0) continue;
            prefetch.some();
            multiply_columns<Engine, A::rows, C::scale>(
                columns, words, reinterpret_cast<Word*>(a) + r * words,
                static_cast<ptrdiff_t>(words), reinterpret_cast<Word*>(b) + v * lanes,
                static_cast<ptrdiff_t>(tile), c + r * tile + v * lanes,
                static_cast<ptrdiff_t>(tile), &std::as_const(factor));
        }
    }
}

/// c[r, :] = rescale[r]·c[r, :] + Σ over visible keys of a[r, key]·b[key, :]: O, or dQ.
template <class Engine>
void multiply_keys(const Visibility& view, int rows, int head, const typename Engine::Element* a,
                   const typename Engine::Element* b, float* c, const float* rescale,
                   Prefetch& prefetch) {
    using Word = const typename Engine::Word;
    const int vectors = head / lanes;
    for (int v = 0; v < vectors; v += max_columns) {
        const int columns = std::min(max_columns, vectors - v);
        for (int r = 0; r < rows; r += panel) {
            const int keys = view.end(r + panel - 1);
            const int words = (keys + Engine::depth - 1) / Engine::depth;
            prefetch.some();
            multiply_columns<Engine, A::rows, C::accumulate>(
                columns, words, reinterpret_cast<Word*>(a) + r * (tile / Engine::depth),
                static_cast<ptrdiff_t>(tile / Engine::depth),
                reinterpret_cast<Word*>(b) + v * lanes, static_cast<ptrdiff_t>(head),
                c + r * head + v * lanes, static_cast<ptrdiff_t>(head),
                rescale ? rescale + r : nullptr);
        }
    }
}

/// c[key, :] += Σ over rows that see the key of a[r, key]·b[r, :]: dV, or dK.
template <class Engine>
void multiply_rows(const Visibility& view, int rows, int head, const typename Engine::Element* a,
                   const typename Engine::Element* b, float* c, Prefetch& prefetch) {
    using Word = const typename Engine::Word;
    const int vectors = head / lanes, words = rows / Engine::depth;
    for (int v = 0; v < vectors; v += max_columns) {
        const int columns = std::min(max_columns, vectors - v);
        for (int key = 0; key < view.keys; key += panel) {
            const int first = view.first_row(key) / Engine::depth;
            if (first >= words) break;
            prefetch.some();
            multiply_columns<Engine, A::columns, C::accumulate>(
                columns, words - first, reinterpret_cast<Word*>(a) + first * tile + key,
                static_cast<ptrdiff_t>(tile), reinterpret_cast<Word*>(b) + first * head + v * lanes,
                static_cast<ptrdiff_t>(head), c + key * head + v * lanes,
                static_cast<ptrdiff_t>(head), static_cast<const float*>(nullptr));
        }
    }
}

#if TRAIN_GPT_BF16_PAIRS
inline void store_probabilities(bf16* row, int v, vfloat even, vfloat odd) {
    _mm512_store_si512(row + v * lanes,
                       (__m512i)_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(odd),
                                                    reinterpret_cast<__m512>(even)));
}
#endif

/// One online-softmax step of a tile: scores (in units of log 2) become probabilities relative to
/// the rows' new maxima; rescale[r] is what sums over earlier keys must be multiplied with. bf16
/// rows overwrite the scores row by row.
template <class Engine>
void softmax_step(const Visibility& view, int rows, float* scores, float* row_max, float* row_sum,
                  float* rescale) {
    constexpr bool coarse = Engine::depth > 1;
    for (int r0 = 0; r0 < rows; r0 += lanes) {
        vfloat largest[lanes];
        for (int i = 0; i < lanes; ++i) {
            const int r = r0 + i;
            largest[i] = all(minus_infinity);
            if (r >= rows) continue;
            float* row = scores + r * tile;
            const int end = view.end(r), first = view.first(r),
                      vectors = view.vectors(r / panel * panel);
            for (int v = 0; v < vectors; ++v) {
                vfloat s = load(row + v * lanes);
                if (first > v * lanes || end < (v + 1) * lanes) {
                    s = sees(v, first, end) ? s : all(minus_infinity);
                    store(row + v * lanes, s);
                }
                largest[i] = max(s, largest[i]);
            }
        }
        const vfloat old_max = load(row_max + r0);
        const vfloat new_max = max(reduce_rows(largest, take_max), old_max);
        // While a row has seen no key its maximum is −∞; any finite reference gives the zeros it
        // needs.
        const vfloat reference = new_max == minus_infinity ? vfloat{} : new_max;
        store(row_max + r0, new_max);
        store(rescale + r0, exp2<false>(old_max - reference));

        alignas(64) float references[lanes];
        store(references, reference);
        for (int i = 0; i < lanes && r0 + i < rows; ++i) {
            const int r = r0 + i;
            float* row = scores + r * tile;
            const int vectors = view.vectors(r / panel * panel);
            vfloat sum = load(row_sum + r * lanes) * rescale[r];
            if constexpr (Engine::depth == 1) {
                for (int v = 0; v < vectors; ++v) {
                    const vfloat p = exp2<coarse>(load(row + v * lanes) - references[i]);
                    sum += p;
                    store(row + v * lanes, p);
                }
            } else {
#if TRAIN_GPT_BF16_PAIRS
                bf16* packed = reinterpret_cast<bf16*>(scores) + r * tile;
                for (int v = 0; v < vectors; v += 2) {
                    const vfloat even = exp2<coarse>(load(row + v * lanes) - references[i]);
                    vfloat odd = {};
                    if (v + 1 < vectors)
                        odd = exp2<coarse>(load(row + (v + 1) * lanes) - references[i]);
                    sum += even + odd;
                    store_probabilities(packed, v, even, odd);
                }
#endif
            }
            store(row_sum + r * lanes, sum);
        }
    }
}

/// Queries [t0, t0 + 256) of one head.
struct ForwardBlock {
    int64_t b, h, t0;
};

/// next: what this thread does afterwards, or null.
template <class Engine, class Storage>
void forward_block(const AttentionForward& args, const ForwardBlock& block,
                   const ForwardBlock* next, char* memory) {
    using Element = typename Engine::Element;
    const AttentionShape& shape = args.shape;
    Pieces pieces(memory);
    const ForwardScratch<Engine> my(pieces, shape);

    const auto [b, h, t0] = block;
    const int64_t group = shape.H / shape.H_kv, h_kv = h / group, offset = shape.S - shape.T;
    const int D = shape.D, head = padded_head(D), words = head / Engine::depth;
    const int rows = static_cast<int>(std::min<int64_t>(block_rows, shape.T - t0));
    const int padded_rows = static_cast<int>(round_up(rows, lanes));

    pack_rows(my.q, head, at<const Storage>(args.q, b, t0, h), args.q.token, rows, padded_rows, D);
    std::fill_n(my.row_max, padded_rows, minus_infinity);
    std::fill_n(my.row_sum, padded_rows * lanes, 0.0f);
    std::fill_n(my.out, static_cast<int64_t>(padded_rows) * head, 0.0f);

    Prefetch prefetch;
    if (next) {
        prefetch.add<Storage>(args.k, next->b, 0, next->h / group, std::min(tile, shape.S), D);
        prefetch.add<Storage>(args.v, next->b, 0, next->h / group, std::min(tile, shape.S), D);
        prefetch.add<Storage>(args.q, next->b, next->t0, next->h,
                              std::min<int64_t>(block_rows, shape.T - next->t0), D);
    }
    prefetch.add<Storage>(args.out, b, t0, h, rows, D);

    const int64_t keys_end = t0 + rows + offset;
    for (int64_t key0 = first_key(shape, b, t0, rows) / tile * tile; key0 < keys_end;
         key0 += tile) {
        const int keys = static_cast<int>(std::min<int64_t>(tile, keys_end - key0));
        const int padded_keys = static_cast<int>(round_up(keys, lanes));
        pack_rows(my.key_rows, head, at<const Storage>(args.k, b, key0, h_kv), args.k.token, keys,
                  padded_keys, D);
        pack_transposed(reinterpret_cast<float*>(my.key_columns),
                        reinterpret_cast<const float*>(my.key_rows), words, padded_keys);
        Element* value_rows = Engine::depth > 1 ? my.key_rows : my.values;
        pack_rows(value_rows, head, at<const Storage>(args.v, b, key0, h_kv), args.v.token, keys,
                  padded_keys, D);
        const Element* values = pack_depth(my.values, value_rows, padded_keys, head);
        const int64_t after = key0 + tile;
        prefetch.add<Storage>(args.v, b, after, h_kv, std::min<int64_t>(tile, keys_end - after), D);
        prefetch.add<Storage>(args.k, b, after, h_kv, std::min<int64_t>(tile, keys_end - after), D);

        for (int r0 = 0; r0 < rows; r0 += tile) {
            const int here = std::min(tile, padded_rows - r0);
            const Visibility view{
                t0 + r0 + offset - key0, std::min(here, rows - r0), keys,
                shape.doc_start ? shape.doc_start + b * shape.T + t0 + r0 : nullptr, key0};
            if (view.empty()) continue;
            multiply_visible<Engine>(view, here, words, my.q + r0 * head, my.key_columns, my.scores,
                                     shape.scale * log2_e, prefetch);
            softmax_step<Engine>(view, here, my.scores, my.row_max + r0, my.row_sum + r0 * lanes,
                                 my.rescale);
            multiply_keys<Engine>(view, here, head, reinterpret_cast<const Element*>(my.scores),
                                  values, my.out + r0 * head, my.rescale, prefetch);
        }
    }

    for (int r0 = 0; r0 < rows; r0 += lanes) {
        vfloat sums[lanes];
        for (int i = 0; i < lanes; ++i) sums[i] = load(my.row_sum + (r0 + i) * lanes);
        alignas(64) float total[lanes];
        store(total, reduce_rows(sums, take_sum));
        for (int i = 0; i < lanes && r0 + i < rows; ++i) {
            const int r = r0 + i;
            write_row(at<Storage>(args.out, b, t0 + r, h), my.out + r * head, 1.0f / total[i], D);
            if (args.lse)
                args.lse[(b * shape.H + h) * shape.T + t0 + r] =
                    my.row_max[r] * ln_2 + std::log(total[i]);
        }
    }
}

// ---------------------------------------------------------------------------------------- decoding

/// A step of generation has so few queries that packing the keys would cost more than using them;
/// below this many each query walks over keys and values where they lie.
constexpr int few_queries = 4;

struct DecodeScratch {
    float *k, *v;
    DecodeScratch(Pieces& pieces, const AttentionShape& shape) {
        k = pieces.take<float>(tile * padded_head(shape.D));
        v = pieces.take<float>(tile * padded_head(shape.D));
    }
};

/// Query t of one head. Keys come in tiles of 64, aligned as in forward_block.
template <class Storage>
void forward_query(const AttentionForward& args, int64_t b, int64_t h, int64_t t, char* memory) {
    const AttentionShape& shape = args.shape;
    Pieces pieces(memory);
    const DecodeScratch my(pieces, shape);
    const int64_t h_kv = h / (shape.H / shape.H_kv), position = t + shape.S - shape.T;
    const int D = shape.D, head = padded_head(D), vectors = head / lanes;
    const int64_t first = shape.doc_start ? shape.doc_start[b * shape.T + t] : 0;

    alignas(64) float q[max_head], out[max_head], scores[tile];
    convert(q, at<const Storage>(args.q, b, t, h), D);
    for (int d = 0; d < D; ++d) q[d] *= shape.scale * log2_e;
    std::fill(q + D, q + head, 0.0f);
    std::fill(out, out + head, 0.0f);

    float row_max = minus_infinity;
    vfloat sum = {};
    const auto attend = [&](auto* k, int64_t k_stride, auto* v, int64_t v_stride, int skip,
                            int keys) {
        for (int j = 0; j < keys; j += lanes) {
            vfloat products[lanes];
            for (int i = 0; i < lanes; ++i) {
                const auto* row = k + std::min(j + i, keys - 1) * k_stride;
                vfloat dot = load(q) * load_unaligned(row);
                for (int n = 1; n < vectors; ++n)
                    dot += load(q + n * lanes) * load_unaligned(row + n * lanes);
                products[i] = dot;
            }
            const vfloat s = reduce_rows(products, take_sum);
            store(scores + j, sees(j / lanes, skip, keys) ? s : all(minus_infinity));
        }
        float new_max = row_max;
        for (int j = 0; j < keys; ++j) new_max = std::max(new_max, scores[j]);
        const float reference = new_max == minus_infinity ? 0.0f : new_max;
        const float rescale = exp2<false>(all(row_max - reference))[0];
        row_max = new_max;
        sum *= rescale;
        for (int j = 0; j < keys; j += lanes) {
            const vfloat p = exp2<false>(load(scores + j) - reference);
            sum += p;
            store(scores + j, p);
        }
        for (int n = 0; n < vectors; n += 4) {
            const int columns = std::min(4, vectors - n);
            vfloat acc[4] = {};
            for (int c = 0; c < columns; ++c) acc[c] = load(out + (n + c) * lanes) * rescale;
            const auto* row = v + skip * v_stride + n * lanes;
            if (columns == 4) {
                for (int j = skip; j < keys; ++j, row += v_stride) {
#pragma GCC unroll 4
                    for (int c = 0; c < 4; ++c)
                        acc[c] += scores[j] * load_unaligned(row + c * lanes);
                }
            } else {
                for (int j = skip; j < keys; ++j, row += v_stride) {
                    for (int c = 0; c < columns; ++c)
                        acc[c] += scores[j] * load_unaligned(row + c * lanes);
                }
            }
            for (int c = 0; c < columns; ++c) store(out + (n + c) * lanes, acc[c]);
        }
    };

    for (int64_t key0 = first / tile * tile; key0 <= position; key0 += tile) {
        const int keys = static_cast<int>(std::min<int64_t>(tile, position + 1 - key0));
        const int skip = static_cast<int>(std::max<int64_t>(0, first - key0));
        const Storage* k = at<const Storage>(args.k, b, key0, h_kv);
        const Storage* v = at<const Storage>(args.v, b, key0, h_kv);
        if (D == head) {
            attend(k, args.k.token, v, args.v.token, skip, keys);
        } else {
            pack_rows(my.k, head, k, args.k.token, keys, keys, D);
            pack_rows(my.v, head, v, args.v.token, keys, keys, D);
            attend(static_cast<const float*>(my.k), head, static_cast<const float*>(my.v), head,
                   skip, keys);
        }
    }
    float total = 0;
    for (int i = 0; i < lanes; ++i) total += sum[i];
    write_row(at<Storage>(args.out, b, t, h), out, 1.0f / total, D);
    if (args.lse) args.lse[(b * shape.H + h) * shape.T + t] = row_max * ln_2 + std::log(total);
}

// ---------------------------------------------------------------------------------------- backward

/// P = 2^(scores − lse) and dS = P ⊙ (dP − δ), in place of scores and dP.
template <class Engine>
void softmax_backward_step(const Visibility& view, int rows, const BackwardScratch<Engine>& my,
                           const float* lse, const float* delta) {
    constexpr bool coarse = Engine::depth > 1;
    for (int r = 0; r < rows; r += Engine::depth) {
        const int vectors = view.vectors(r / panel * panel);
        // Padding pairs up with the last vector where a row has an odd number of them.
        [[maybe_unused]] vfloat ds_of[Engine::depth][tile / lanes] = {};
        for (int v = 0; v < vectors; ++v) {
            vfloat p[Engine::depth], ds[Engine::depth];
            for (int i = 0; i < Engine::depth; ++i) {
                const int at = (r + i) * tile + v * lanes;
                p[i] = exp2<coarse>(load(my.scores + at) - lse[r + i]);
                ds[i] = p[i] * (load(my.dp + at) - delta[r + i]);
                const int end = view.end(r + i), first = view.first(r + i);
                if (first > v * lanes || end < (v + 1) * lanes) {
                    const vint seen = sees(v, first, end);
                    p[i] = seen ? p[i] : vfloat{};
                    ds[i] = seen ? ds[i] : vfloat{};
                }
                ds_of[i][v] = ds[i];
            }
            if constexpr (Engine::depth == 1) {
                store(my.scores + r * tile + v * lanes, p[0]);
                store(my.dp + r * tile + v * lanes, ds[0]);
            } else {
#if TRAIN_GPT_BF16_PAIRS
                _mm512_store_si512(my.p_columns + r * tile + 2 * v * lanes, pair_up(p[0], p[1]));
                _mm512_store_si512(my.ds_columns + r * tile + 2 * v * lanes, pair_up(ds[0], ds[1]));
#endif
            }
        }
#if TRAIN_GPT_BF16_PAIRS
        if constexpr (Engine::depth > 1) {
            for (int i = 0; i < Engine::depth; ++i) {
                for (int v = 0; v < vectors; v += 2) {
                    store_probabilities(my.ds_rows + (r + i) * tile, v, ds_of[i][v],
                                        ds_of[i][v + 1]);
                }
            }
        }
#endif
    }
}

/// What one call of backward_range computes: gradients of the queries [t0, t1) of heads [h0, h1),
/// which share key head h_kv, and what these queries add to the gradients of keys [s0, s1).
struct BackwardRange {
    int64_t b, h_kv, h0, h1, t0, t1, s0, s1;
};

/// next: what this thread does afterwards, or null.
template <class Engine, class Storage, bool want_dq, bool want_dkv>
void backward_range(const AttentionBackward& args, const BackwardRange& range,
                    const BackwardRange* next, char* memory) {
    using Element = typename Engine::Element;
    const AttentionShape& shape = args.shape;
    Pieces pieces(memory);
    const BackwardScratch<Engine> my(pieces, shape, want_dkv ? range.s1 - range.s0 : 0);
    const int64_t b = range.b, h_kv = range.h_kv, group = shape.H / shape.H_kv;
    const int D = shape.D, head = padded_head(D), words = head / Engine::depth;
    if (want_dkv) {
        std::fill_n(my.dk, round_up(range.s1 - range.s0, tile) * head, 0.0f);
        std::fill_n(my.dv, round_up(range.s1 - range.s0, tile) * head, 0.0f);
    }

    for (int64_t h = range.h0; h < range.h1; ++h) {
        for (int64_t t0 = range.t0; t0 < range.t1; t0 += block_rows) {
            const int rows = static_cast<int>(std::min<int64_t>(block_rows, range.t1 - t0));
            const int padded_rows = static_cast<int>(round_up(rows, lanes));
            const int64_t keys_begin =
                std::max(range.s0, first_key(shape, b, t0, rows) / tile * tile);
            const int64_t keys_end = std::min(range.s1, t0 + rows);
            const bool last_of_head = t0 + block_rows >= range.t1,
                       last = last_of_head && h + 1 == range.h1;

            Prefetch prefetch;
            const auto expect_block = [&](int64_t b2, int64_t h2, int64_t t2, int64_t end,
                                          int64_t s2) {
                const int64_t more = std::min<int64_t>(block_rows, end - t2),
                              keys = std::min<int64_t>(tile, end - s2);
                prefetch.add<Storage>(args.v, b2, s2, h2 / group, keys, D);
                prefetch.add<Storage>(args.k, b2, s2, h2 / group, keys, D);
                prefetch.add<Storage>(args.out, b2, t2, h2, more, D);
                prefetch.add<Storage>(args.dout, b2, t2, h2, more, D);
                prefetch.add<Storage>(args.q, b2, t2, h2, more, D);
            };
            if (!last) {
                expect_block(b, last_of_head ? h + 1 : h, last_of_head ? range.t0 : t0 + block_rows,
                             range.t1, range.s0);
            } else if (next) {
                expect_block(next->b, next->h0, next->t0, next->t1, next->s0);
            }
            if (want_dq) prefetch.add<Storage>(args.dq, b, t0, h, rows, D);

            pack_rows(my.q, head, at<const Storage>(args.q, b, t0, h), args.q.token, rows,
                      padded_rows, D);
            pack_rows(my.dout, head, at<const Storage>(args.dout, b, t0, h), args.dout.token, rows,
                      padded_rows, D);
            const Element* q_deep = pack_depth(my.q_deep, my.q, padded_rows, head);
            const Element* dout_deep = pack_depth(my.dout_deep, my.dout, padded_rows, head);
            std::fill_n(my.delta, padded_rows, 0.0f);
            std::fill_n(my.lse, padded_rows, 0.0f);
            row_products(my.delta, at<const Storage>(args.out, b, t0, h), args.out.token,
                         at<const Storage>(args.dout, b, t0, h), args.dout.token, rows, D);
            for (int r = 0; r < rows; ++r)
                my.lse[r] = args.lse[(b * shape.H + h) * shape.T + t0 + r] * log2_e;
            if (want_dq) std::fill_n(my.dq, static_cast<int64_t>(padded_rows) * head, 0.0f);

            // The last block goes over all keys of the range, seen or not, for after it their
            // gradients are complete.
            const bool finish = want_dkv && last;
            for (int64_t key0 = finish ? range.s0 : keys_begin;
                 key0 < (finish ? range.s1 : keys_end); key0 += tile) {
                float* dk = my.dk + (key0 - range.s0) * head;
                float* dv = my.dv + (key0 - range.s0) * head;
                if (finish) {
                    prefetch.add<Storage>(args.dv, b, key0, h_kv,
                                          std::min<int64_t>(tile, range.s1 - key0), D);
                    prefetch.add<Storage>(args.dk, b, key0, h_kv,
                                          std::min<int64_t>(tile, range.s1 - key0), D);
                }
                if (key0 >= keys_begin && key0 < keys_end) {
                    const int keys = static_cast<int>(std::min<int64_t>(tile, keys_end - key0));
                    const int padded_keys = static_cast<int>(round_up(keys, lanes));
                    const Storage* k = at<const Storage>(args.k, b, key0, h_kv);
                    const Storage* v = at<const Storage>(args.v, b, key0, h_kv);
                    pack_rows(my.key_rows, head, k, args.k.token, keys, padded_keys, D);
                    pack_rows(my.value_rows, head, v, args.v.token, keys, padded_keys, D);
                    pack_transposed(reinterpret_cast<float*>(my.key_columns),
                                    reinterpret_cast<const float*>(my.key_rows), words,
                                    padded_keys);
                    pack_transposed(reinterpret_cast<float*>(my.value_columns),
                                    reinterpret_cast<const float*>(my.value_rows), words,
                                    padded_keys);
                    const Element* keys_deep =
                        pack_depth(my.keys_deep, my.key_rows, padded_keys, head);
                    const int64_t after = key0 + tile;
                    prefetch.add<Storage>(args.v, b, after, h_kv,
                                          std::min<int64_t>(tile, keys_end - after), D);
                    prefetch.add<Storage>(args.k, b, after, h_kv,
                                          std::min<int64_t>(tile, keys_end - after), D);

                    for (int r0 = 0; r0 < rows; r0 += tile) {
                        const int here = std::min(tile, padded_rows - r0);
                        const Visibility view{
                            t0 + r0 - key0, std::min(here, rows - r0), keys,
                            shape.doc_start ? shape.doc_start + b * shape.T + t0 + r0 : nullptr,
                            key0};
                        if (view.empty()) continue;
                        multiply_visible<Engine>(view, here, words, my.q + r0 * head,
                                                 my.key_columns, my.scores, shape.scale * log2_e,
                                                 prefetch);
                        multiply_visible<Engine>(view, here, words, my.dout + r0 * head,
                                                 my.value_columns, my.dp, 1.0f, prefetch);
                        softmax_backward_step<Engine>(view, here, my, my.lse + r0, my.delta + r0);

                        const Element *p_columns = my.p_columns, *ds_columns = my.ds_columns,
                                      *ds_rows = my.ds_rows;
                        if constexpr (Engine::depth == 1) {
                            p_columns = my.scores;
                            ds_columns = ds_rows = my.dp;
                        }
                        if (want_dkv) {
                            multiply_rows<Engine>(view, here, head, p_columns,
                                                  dout_deep + r0 * head, dv, prefetch);
                            multiply_rows<Engine>(view, here, head, ds_columns, q_deep + r0 * head,
                                                  dk, prefetch);
                        }
                        if (want_dq) {
                            multiply_keys<Engine>(view, here, head, ds_rows, keys_deep,
                                                  my.dq + r0 * head, nullptr, prefetch);
                        }
                    }
                }
                if (finish) {
                    const int keys = static_cast<int>(std::min<int64_t>(tile, range.s1 - key0));
                    write_rows(at<Storage>(args.dk, b, key0, h_kv), args.dk.token, dk, head,
                               shape.scale, keys, D);
                    write_rows(at<Storage>(args.dv, b, key0, h_kv), args.dv.token, dv, head, 1.0f,
                               keys, D);
                }
            }
            if (want_dq) {
                write_rows(at<Storage>(args.dq, b, t0, h), args.dq.token, my.dq, head, shape.scale,
                           rows, D);
            }
        }
    }
}

// ----------------------------------------------------------------------------------------- sharing

int64_t blocks_of(int64_t T) { return (T + block_rows - 1) / block_rows; }

/// Whether the backward pass gives each thread whole key heads (five products per tile), or goes
/// over queries and then over keys in blocks (seven products, but more pieces to share): whichever
/// ends first on this many threads.
bool backward_in_blocks(const AttentionShape& shape, int threads) {
    const double heads = static_cast<double>(shape.B) * shape.H_kv,
                 blocks = static_cast<double>(blocks_of(shape.T));
    const double whole = 5 * std::ceil(heads / threads);
    // A causal block's share of its head grows with its position.
    const double longest_block = 2 / (blocks + 1);
    return 7 * std::max(heads / threads, longest_block) < whole;
}

template <class Engine>
size_t bytes_per_thread(const AttentionShape& shape, int threads) {
    size_t bytes = 0;
    {
        Pieces pieces(nullptr);
        ForwardScratch<Engine>(pieces, shape);
        bytes = std::max(bytes, pieces.used());
    }
    {
        Pieces pieces(nullptr);
        DecodeScratch(pieces, shape);
        bytes = std::max(bytes, pieces.used());
    }
    if (shape.T == shape.S) {
        Pieces pieces(nullptr);
        BackwardScratch<Engine>(pieces, shape,
                                backward_in_blocks(shape, threads) ? block_rows : shape.S);
        bytes = std::max(bytes, pieces.used());
    }
    return bytes;
}

template <class F>
decltype(auto) with_engine(DType dtype, F&& f) {
    if (dtype == DType::fp32) return f(Fp32{}, float{});
#if TRAIN_GPT_BF16_PAIRS
    return f(Bf16Pairs{}, bf16{});
#else
    return f(Fp32{}, bf16{});
#endif
}

/// Runs task(i, next, memory) for 0 <= i < count, where `next` is what the same thread will run
/// afterwards, or −1. Each task writes its own part of the outputs, so that who runs it does not
/// matter.
template <class Task>
void share(int64_t count, int threads, char* scratch, size_t bytes, const Task& task) {
    threads = static_cast<int>(std::min<int64_t>(threads, count));
    int64_t taken = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const auto take = [&] {
            int64_t mine;
#pragma omp atomic capture
            mine = taken++;
            return mine < count ? mine : -1;
        };
        char* memory = scratch + static_cast<size_t>(omp_get_thread_num()) * bytes;
        for (int64_t i = take(); i >= 0;) {
            const int64_t next = take();
            task(i, next, memory);
            i = next;
        }
    }
}

int team_size(int64_t pieces) {
    return omp_in_parallel() ? 1
                             : static_cast<int>(std::min<int64_t>(omp_get_max_threads(), pieces));
}

void check(const AttentionShape& shape, const char* where) {
    if (shape.dtype != DType::fp32 && shape.dtype != DType::bf16) {
        throw Error(where, ": dtype ", name_of(shape.dtype), " is not supported; use fp32 or bf16");
    }
    if (shape.D < 1 || shape.D > max_head) {
        throw Error(where, ": head size ", shape.D, " is out of range; it must be between 1 and ",
                    max_head);
    }
    if (shape.H < 1 || shape.H_kv < 1 || shape.H % shape.H_kv != 0) {
        throw Error(where, ": ", shape.H, " query heads cannot share ", shape.H_kv,
                    " key heads; the first must be a multiple of the second");
    }
    if (shape.B < 0 || shape.T < 0 || shape.S < shape.T) {
        throw Error(where, ": B = ", shape.B, ", T = ", shape.T, ", S = ", shape.S,
                    " is no valid shape; 0 <= T <= S and 0 <= B");
    }
}

// Where the document of each query starts; on a GPU the host does not see it.
void check_documents(const AttentionShape& shape, const char* where) {
    if (!shape.doc_start) return;
    for (int64_t i = 0; i < int64_t{shape.B} * shape.T; ++i) {
        const int64_t position = i % shape.T + shape.S - shape.T;
        if (shape.doc_start[i] < 0 || shape.doc_start[i] > position) {
            throw Error(where, ": doc_start of sequence ", i / shape.T, ", token ", i % shape.T,
                        " is ", shape.doc_start[i],
                        "; it must be between 0 and the token's own position ", position);
        }
    }
}

void check(const HeadsView& view, const char* name, const char* where) {
    if (!view.data)
        throw Error(where, ": ", name, " is missing; every tensor but lse must be given");
}

}  // namespace

size_t attention_scratch_bytes(const Device& device, const AttentionShape& shape) {
    check(shape, "attention_scratch_bytes");
    TRAIN_GPT_ON_CUDA(device, attention_scratch_bytes(shape));
    const int64_t pieces =
        int64_t{shape.B} * shape.H * (shape.T < few_queries ? shape.T : blocks_of(shape.T));
    const auto threads = static_cast<int>(std::min<int64_t>(omp_get_max_threads(), pieces));
    return with_engine(shape.dtype, [&](auto engine, auto) {
        size_t bytes = 0;  // a smaller team may need more each, where it gets whole heads
        for (int n = 1; n <= threads; ++n) {
            bytes = std::max(bytes,
                             static_cast<size_t>(n) * bytes_per_thread<decltype(engine)>(shape, n));
        }
        return bytes;
    });
}

void attention_forward(Stream& stream, const AttentionForward& args) {
    const Profiled profiled(stream, cost_of(args));
    const AttentionShape& shape = args.shape;
    check(shape, "attention_forward");
    if (shape.B == 0 || shape.T == 0) return;
    check(args.q, "q", "attention_forward");
    check(args.k, "k", "attention_forward");
    check(args.v, "v", "attention_forward");
    check(args.out, "out", "attention_forward");
    TRAIN_GPT_ON_CUDA(stream.device, attention_forward(stream, args));
    check_documents(shape, "attention_forward");

    with_engine(shape.dtype, [&](auto engine, auto storage) {
        using Engine = decltype(engine);
        using Storage = decltype(storage);
        const int64_t heads = int64_t{shape.B} * shape.H;
        const bool few = shape.T < few_queries;
        const int64_t blocks = few ? shape.T : blocks_of(shape.T), count = heads * blocks;
        const int threads = team_size(count);
        const size_t bytes = bytes_per_thread<Engine>(shape, threads);
        char* scratch = stream.scratch_for<char>(bytes * static_cast<size_t>(threads));
        if (few) {
            share(count, threads, scratch, bytes, [&](int64_t i, int64_t, char* memory) {
                forward_query<Storage>(args, i / shape.H % shape.B, i % shape.H, i / heads, memory);
            });
            return;
        }
        // The last blocks see most keys: they go first, so that threads end together.
        const auto block = [&](int64_t i) {
            return ForwardBlock{i % heads / shape.H, i % shape.H,
                                (blocks - 1 - i / heads) * block_rows};
        };
        share(count, threads, scratch, bytes, [&](int64_t i, int64_t next, char* memory) {
            const ForwardBlock mine = block(i), other = block(std::max<int64_t>(next, 0));
            forward_block<Engine, Storage>(args, mine, next < 0 ? nullptr : &other, memory);
        });
    });
}

void attention_backward(Stream& stream, const AttentionBackward& args) {
    const Profiled profiled(stream, cost_of(args));
    const AttentionShape& shape = args.shape;
    check(shape, "attention_backward");
    if (shape.T != shape.S) {
        throw Error("attention_backward: T = ", shape.T, " but S = ", shape.S,
                    "; gradients exist for whole sequences only, without a cache");
    }
    if (shape.B == 0 || shape.T == 0) return;
    check(args.q, "q", "attention_backward");
    check(args.k, "k", "attention_backward");
    check(args.v, "v", "attention_backward");
    check(args.out, "out", "attention_backward");
    check(args.dout, "dout", "attention_backward");
    check(args.dq, "dq", "attention_backward");
    check(args.dk, "dk", "attention_backward");
    check(args.dv, "dv", "attention_backward");
    if (!args.lse) throw Error("attention_backward: lse is missing; the forward pass must save it");
    TRAIN_GPT_ON_CUDA(stream.device, attention_backward(stream, args));
    check_documents(shape, "attention_backward");

    with_engine(shape.dtype, [&](auto engine, auto storage) {
        using Engine = decltype(engine);
        using Storage = decltype(storage);
        const int64_t T = shape.T, group = shape.H / shape.H_kv, blocks = blocks_of(T);
        const int64_t key_heads = int64_t{shape.B} * shape.H_kv, heads = int64_t{shape.B} * shape.H;
        const int threads = team_size(heads * (T < few_queries ? T : blocks));
        const bool in_blocks = backward_in_blocks(shape, threads);
        const size_t bytes = bytes_per_thread<Engine>(shape, threads);
        char* scratch = stream.scratch_for<char>(bytes * static_cast<size_t>(threads));
        const auto run = [&](int64_t count, auto range_of, auto compute) {
            share(count, threads, scratch, bytes, [&](int64_t i, int64_t next, char* memory) {
                const BackwardRange mine = range_of(i),
                                    other = range_of(std::max<int64_t>(next, 0));
                compute(args, mine, next < 0 ? nullptr : &other, memory);
            });
        };
        if (!in_blocks) {
            const auto whole_head = [&](int64_t i) {
                const int64_t h = i % shape.H_kv;
                return BackwardRange{i / shape.H_kv, h, h * group, (h + 1) * group, 0, T, 0, T};
            };
            run(key_heads, whole_head, backward_range<Engine, Storage, true, true>);
            return;
        }
        const auto queries = [&](int64_t i) {
            const int64_t head = i % heads, h = head % shape.H,
                          t0 = (blocks - 1 - i / heads) * block_rows;
            return BackwardRange{head / shape.H,
                                 h / group,
                                 h,
                                 h + 1,
                                 t0,
                                 std::min<int64_t>(T, t0 + block_rows),
                                 0,
                                 T};
        };
        const auto keys = [&](int64_t i) {
            const int64_t head = i % key_heads, h = head % shape.H_kv,
                          s0 = i / key_heads * block_rows;
            return BackwardRange{head / shape.H_kv,
                                 h,
                                 h * group,
                                 (h + 1) * group,
                                 s0,
                                 T,
                                 s0,
                                 std::min<int64_t>(T, s0 + block_rows)};
        };
        run(heads * blocks, queries, backward_range<Engine, Storage, true, false>);
        run(key_heads * blocks, keys, backward_range<Engine, Storage, false, true>);
    });
}

namespace {

/// Pairs of a query and a key that it sees, over batch and heads, in one document.
double pairs(const AttentionShape& s) {
    const double T = s.T, S = s.S;
    return (T * (S - T) + T * (T + 1) / 2) * s.B * s.H;
}

double tokens_bytes(const AttentionShape& s, int heads, int tokens) {
    return static_cast<double>(s.B) * tokens * heads * s.D * static_cast<double>(size_of(s.dtype));
}

}  // namespace

Cost cost_of(const AttentionForward& a) {
    const AttentionShape& s = a.shape;
    return {"attention_forward", 2 * tokens_bytes(s, s.H, s.T) + 2 * tokens_bytes(s, s.H_kv, s.S),
            4.0 * pairs(s) * s.D};
}

Cost cost_of(const AttentionBackward& a) {
    const AttentionShape& s = a.shape;
    return {"attention_backward", 4 * tokens_bytes(s, s.H, s.T) + 4 * tokens_bytes(s, s.H_kv, s.S),
            10.0 * pairs(s) * s.D};
}

}  // namespace train_gpt
