// Packing for attention on the CPU: copies rows of a head into contiguous, zero-padded operands of
// the micro-kernels, and back.
#pragma once
#include <algorithm>
#include <cstring>

#include "kernels/attention/attention.h"
#include "kernels/attention/micro_kernels.h"

namespace train_gpt::cpu {

// Queries and keys of a tile: a 64 × 64 operand takes half of a first-level cache of 32 KiB.
constexpr int tile = 64;
// Queries that share one packing of the keys. With 64 columns an operand takes 64 KiB, so all
// operands fit into the second-level cache.
constexpr int block_rows = 256;
constexpr int max_head = 256;
static_assert(tile % lanes == 0 && tile % panel_rows == 0 && lanes % panel_rows == 0 &&
              block_rows % tile == 0);

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
template <class Engine>
int padded_head(int D) {
    return static_cast<int>(round_up(D, Engine::unit));
}
template <class Engine>
int block_height(int T) {
    return static_cast<int>(std::min<int64_t>(block_rows, round_up(T, Engine::unit)));
}

template <class T>
inline T* at(const HeadsView& view, int64_t b, int64_t t, int64_t h) {
    return static_cast<T*>(view.data) + b * view.batch + t * view.token + h * view.head;
}

/// Rows of a head from token t on.
template <class T>
inline Rows<T> rows_at(const HeadsView& view, int64_t b, int64_t t, int64_t h) {
    return {at<T>(view, b, t, h), view.token};
}

/// Rows of the tensors that will be read or written soon. A head's rows are too far apart for
/// hardware prefetchers. Prefetching a few of them into the second-level cache with each panel of a
/// product costs nothing. The rows added last are prefetched first. This is only a hint: rows that
/// exceed the capacity are dropped.
class Prefetch {
  public:
    template <class Storage>
    void add(const HeadsView& view, int64_t b, int64_t t, int64_t h, int64_t rows, int D) {
        if (count_ == capacity || rows <= 0) return;
        parts_[count_++] = {reinterpret_cast<const char*>(at<const Storage>(view, b, t, h)),
                            view.token * static_cast<int64_t>(sizeof(Storage)), rows,
                            D * static_cast<int>(sizeof(Storage))};
    }

    void some(int panels = 1) {
        for (int i = 0; i < rows_at_once * panels && count_ > 0; ++i) {
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
    // A block's products have about a third as many panels as the block touches rows.
    static constexpr int rows_at_once = 4;
    struct Part {
        const char* row;
        int64_t stride, rows;
        int bytes;
    };
    Part parts_[capacity];
    int count_ = 0;
};

inline void convert(float* dst, const float* src, int n) {
    std::memcpy(dst, src, sizeof(float) * static_cast<size_t>(n));
}
inline void convert(bf16* dst, const bf16* src, int n) {
    std::memcpy(dst, src, sizeof(bf16) * static_cast<size_t>(n));
}
inline void convert(float* dst, const bf16* src, int n) {
    for (int i = 0; i < n; ++i) dst[i] = to_float(src[i]);
}

/// dst[r, 0..padded) = src[r, 0..D), zeros in the padding and in the rows from `rows` up to
/// `padded_rows`.
template <class Element, class Storage>
void pack_rows(Element* dst, int padded, Rows<const Storage> src, int rows, int padded_rows,
               int D) {
    for (int r = 0; r < rows; ++r, dst += padded, src.data += src.stride) {
        convert(dst, src.data, D);
        if (D < padded)
            std::memset(static_cast<void*>(dst + D), 0,
                        sizeof(Element) * static_cast<size_t>(padded - D));
    }
    if (rows < padded_rows) {
        const size_t rest = static_cast<size_t>(padded_rows - rows) * static_cast<size_t>(padded);
        std::memset(static_cast<void*>(dst), 0, sizeof(Element) * rest);
    }
}

/// dst[k, r] = src[r, k] in words, for r < rows and k < words; dst rows are `width` wide. For a
/// tile of keys: B of a product over the head dimension.
inline void pack_transposed(float* dst, int width, const float* src, int words, int rows) {
    for (int r = 0; r < rows; r += lanes) {
        for (int k = 0; k < words; k += lanes) {
            vfloat square[lanes];
            // For bf16 pairs, `words` is half of the padded head size, a multiple of lanes / 2.
            const int depth = std::min(lanes, words - k);
#pragma GCC unroll 16
            for (int i = 0; i < lanes; ++i) square[i] = load_unaligned(src + (r + i) * words + k);
            transpose(square);
            for (int i = 0; i < depth; ++i) store(dst + (k + i) * width + r, square[i]);
        }
    }
}

/// B of a product over rows. Plain floats need no packing.
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
inline const bf16* pack_depth(bf16* dst, const bf16* src, int rows, int padded) {
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

/// dst[d, r] = src[r, d], for each tile of rows: [padded, tile]. `deep`: memory for a tile.
inline void pack_columns(bf16* dst, bf16* deep, const bf16* src, int rows, int padded) {
    for (int r0 = 0; r0 < rows; r0 += tile) {
        const int here = std::min(tile, rows - r0);
        pack_depth(deep, src + r0 * padded, here, padded);
        pack_transposed(reinterpret_cast<float*>(dst + r0 * padded), tile / 2,
                        reinterpret_cast<const float*>(deep), padded, here / 2);
    }
}
#endif

template <class Storage>
inline void write_row(Storage* __restrict dst, const float* __restrict src, float factor, int D) {
    for (int d = 0; d < D; ++d) dst[d] = Storage(src[d] * factor);
}
/// dst[r, d] = factor·src[r, d] for r < rows and d < D.
template <class Storage>
void write_rows(Rows<Storage> dst, Rows<const float> src, float factor, int rows, int D) {
    for (int r = 0; r < rows; ++r) write_row(dst.row(r), src.row(r), factor, D);
}
/// to[r, d] += factor·from[r, d] for r < rows and d < D.
inline void add_rows(Rows<float> to, Rows<const float> from, float factor, int rows, int D) {
    for (int r = 0; r < rows; ++r) {
        float* const dst = to.row(r);
        const float* const src = from.row(r);
        for (int d = 0; d < D; ++d) dst[d] += src[d] * factor;
    }
}

/// dst[r] = Σ_d a[r, d]·b[r, d]
template <class Storage>
void row_products(float* dst, Rows<const Storage> a, Rows<const Storage> b, int rows, int D) {
    for (int r0 = 0; r0 < rows; r0 += lanes) {
        const int count = std::min(lanes, rows - r0);
        vfloat sums[lanes] = {};
        alignas(64) float rest[lanes] = {}, total[lanes];
        for (int i = 0; i < count; ++i) {
            const Storage* x = a.row(r0 + i);
            const Storage* y = b.row(r0 + i);
            int d = 0;
            for (; d + lanes <= D; d += lanes)
                sums[i] += load_unaligned(x + d) * load_unaligned(y + d);
            for (; d < D; ++d) rest[i] += to_float(x[d]) * to_float(y[d]);
        }
        store(total, reduce_rows(sums, take_sum));
        for (int i = 0; i < count; ++i) dst[r0 + i] = total[i] + rest[i];
    }
}

/// Hands out 64-byte aligned pieces of one thread's scratch memory; with a null base it only
/// counts.
class Pieces {
  public:
    explicit Pieces(char* base) : base_(base) {}

    template <class T>
    T* take(int64_t count) {
        // Two extra lines keep buffers whose sizes are powers of two from mapping to the same sets
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

}  // namespace train_gpt::cpu
