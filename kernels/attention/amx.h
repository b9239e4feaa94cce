// Products of an attention tile with AMX, which multiplies tiles of 16 rows × 32 bf16. Operands are
// packed as for the dot product of pairs (micro_kernels.h), with lengths padded to 32.
#pragma once
#include "kernels/attention/tile_products.h"

#if TRAIN_GPT_AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace train_gpt::cpu {

/// Asks Linux to let this process use AMX's registers. False if it does not, or the processor has
/// none.
inline bool request_amx() {
    constexpr long arch_req_xcomp_perm = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, arch_req_xcomp_perm, tile_data) == 0;
}

/// Configures this thread's eight tiles as 16 rows of 64 bytes, as long as it lives.
class AmxTiles {
  public:
    AmxTiles() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } const config;
        asm volatile("" ::: "memory");
        _tile_loadconfig(&config);
    }
    ~AmxTiles() { _tile_release(); }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;
};

/// Operands as pairs of bf16, multiplied in squares of 32 × 32 × 32.
struct Amx {
    using Element = bf16;
    using Word = word_bits;
    static constexpr int depth = 2, unit = 32, panel = 32;
    static constexpr bool transposed_sums = true;
    using Setup = AmxTiles;
};

/// C [32, 32] = A·B, plus what C holds if `add`: A [32, 16·steps] and B [16·steps, 32] in words.
[[gnu::noinline]] inline void multiply_square(int steps, WordRows<Amx> a_rows, WordRows<Amx> b_rows,
                                              Rows<float> c_rows, bool add) {
    const word_bits *a = a_rows.data, *b = b_rows.data;
    float* const c = c_rows.data;
    // In bytes.
    const int64_t a_stride = 4 * a_rows.stride, b_stride = 4 * b_rows.stride,
                  c_stride = 4 * c_rows.stride;
    const auto below = [](auto* p, int64_t stride) { return (const char*)p + 16 * stride; };
    // The instructions for loads do not tell the compiler that they read memory.
    asm volatile("" ::: "memory");
    if (add) {
        _tile_loadd(0, c, c_stride);
        _tile_loadd(1, c + 16, c_stride);
        _tile_loadd(2, below(c, c_stride), c_stride);
        _tile_loadd(3, below(c + 16, c_stride), c_stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int i = 0; i < steps; ++i) {
        _tile_loadd(4, a, a_stride);
        _tile_loadd(6, b, b_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 16, b_stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, below(a, a_stride), a_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        a += 16;
        b += 4 * b_stride;  // 16 rows of words
    }
    _tile_stored(0, c, c_stride);
    _tile_stored(1, c + 16, c_stride);
    _tile_stored(2, const_cast<char*>(below(c, c_stride)), c_stride);
    _tile_stored(3, const_cast<char*>(below(c + 16, c_stride)), c_stride);
    asm volatile("" ::: "memory");
}

/// c[r, 0..columns) *= factors[r·step] for 32 rows.
inline void scale_rows(Rows<float> c, int columns, const float* factors, int step) {
    for (int r = 0; r < Amx::unit; ++r, c.data += c.stride, factors += step) {
        for (int i = 0; i < columns; i += lanes) store(c.data + i, load(c.data + i) * *factors);
    }
}

template <>
inline void multiply_visible<Amx>(const Visibility<Amx>& view, TileProduct<Amx> p, float factor,
                                  Prefetch& prefetch) {
    const int words = p.head / Amx::depth;
    for (int r = 0; r < p.rows; r += Amx::unit) {
        const int keys = view.vectors(r) * lanes;
        for (int key = view.first_vector(r) * lanes; key < keys; key += Amx::unit) {
            prefetch.some(4);
            const Rows<float> square{p.c + r * tile + key, tile};
            multiply_square(words / 16, {p.a_words() + r * words, words}, {p.b_words() + key, tile},
                            square, false);
            if (factor != 1.0f) scale_rows(square, Amx::unit, &factor, 0);
        }
    }
}

template <>
inline void multiply_keys<Amx>(const Visibility<Amx>& view, TileProduct<Amx> p,
                               const float* rescale, Prefetch& prefetch) {
    const int head = p.head;
    for (int r = 0; r < p.rows; r += Amx::unit) {
        const int first = view.first_vector(r) * lanes / Amx::unit,
                  steps = view.vectors(r) * lanes / Amx::unit - first;
        // The sums of most rows keep their reference after the first tiles.
        if (rescale && std::any_of(rescale + r, rescale + r + Amx::unit,
                                   [](float factor) { return factor != 1.0f; }))
            scale_rows({p.c + r * head, head}, head, rescale + r, 1);
        for (int d = 0; d < head; d += Amx::unit) {
            prefetch.some(4);
            multiply_square(steps, {p.a_words() + r * (tile / 2) + first * 16, tile / 2},
                            {p.b_words() + first * 16 * head + d, head}, {p.c + r * head + d, head},
                            true);
        }
    }
}

/// c[d, key] += Σ over rows that see the key of b[d, r]·a[r, key]: dVᵀ, or dKᵀ. b has been packed
/// by pack_columns.
template <>
inline void multiply_rows<Amx>(const Visibility<Amx>& view, TileProduct<Amx> p,
                               Prefetch& prefetch) {
    for (int key = 0; key < view.keys; key += Amx::unit) {
        const int64_t end = round_up(view.end_row(key + Amx::unit - 1, p.rows), Amx::unit);
        const int first = view.first_row(key) / Amx::unit,
                  steps = static_cast<int>(end) / Amx::unit - first;
        if (steps <= 0) continue;
        for (int d = 0; d < p.head; d += Amx::unit) {
            prefetch.some(4);
            multiply_square(steps, {p.b_words() + d * (tile / 2) + first * 16, tile / 2},
                            {p.a_words() + first * 16 * tile + key, tile},
                            {p.c + d * tile + key, tile}, true);
        }
    }
}

}  // namespace train_gpt::cpu
#endif
