// Products of an attention tile on the CPU, without the parts that causality and documents mask.
#pragma once
#include <algorithm>

#include "kernels/attention/packing.h"

namespace train_gpt::cpu {

/// Which keys of a tile the queries of a tile see: query row r sees keys [first(r), end(r)) of the
/// tile.
template <class Engine>
struct Visibility {
    int64_t position;  // of row 0, minus the tile's first key
    int rows;          // real rows; the others are padding and are treated as the last real one
    int keys;          // real keys of the tile
    const int32_t* doc_start;  // of row 0, or null
    int64_t key0;
    int64_t first_window;  // where the window of row 0 begins, minus the tile's first key
    bool cut;              // some row's window begins after the tile's first key

    int end(int r) const {
        return static_cast<int>(std::clamp<int64_t>(position + std::min(r, rows - 1) + 1, 0, keys));
    }
    int first(int r) const {
        if (!cut && !doc_start) return 0;
        const int row = std::min(r, rows - 1);
        if (!doc_start) return within(first_window + row);
        return within(std::max(doc_start[row] - key0, first_window + row));
    }
    /// The end of the keys that the panel of row r sees, in vectors, padded.
    int vectors(int r) const {
        const int last = r / Engine::panel * Engine::panel + Engine::panel - 1;
        return static_cast<int>(round_up(end(last), Engine::unit)) / lanes;
    }
    /// The first of these vectors, ignoring documents: the keys before it are not computed.
    int first_vector(int r) const {
        if (!cut) return 0;
        constexpr int depth = Engine::depth;  // bf16 rows are stored in pairs of vectors
        const int row = std::min(r / Engine::panel * Engine::panel, rows - 1);
        return within(first_window + row) / (depth * lanes) * depth;
    }
    /// The first row that sees `key`, ignoring documents.
    int first_row(int key) const { return static_cast<int>(std::max<int64_t>(0, key - position)); }
    /// The end of the rows of `padded_rows` that see `key`.
    int end_row(int key, int padded_rows) const {
        if (!cut) return padded_rows;
        return static_cast<int>(std::clamp<int64_t>(key + 1 - first_window, 0, padded_rows));
    }

    /// Whether all rows see all of a whole tile.
    bool whole() const { return position + 1 >= tile && keys == tile && !cut && !doc_start; }

    bool empty() const {
        // The windows of all rows begin after the tile where the first row's does.
        if (end(rows - 1) == 0 || first_window >= keys) return true;
        if (!doc_start) return false;
        for (int r = 0; r < rows; ++r) {
            if (first(r) < end(r)) return false;
        }
        return true;
    }

  private:
    static int within(int64_t key) { return static_cast<int>(std::clamp<int64_t>(key, 0, tile)); }
};

/// The part of `shape` that the queries from t0 on see of keys [key0, key0 + keys).
template <class Engine>
Visibility<Engine> visibility(const AttentionShape& shape, int64_t b, int64_t t0, int rows,
                              int64_t key0, int keys) {
    const int64_t position = t0 + shape.S - shape.T - key0,
                  first_window = position + 1 - shape.window;
    return {position,
            rows,
            keys,
            shape.doc_start ? shape.doc_start + b * shape.T + t0 : nullptr,
            key0,
            first_window,
            first_window + rows > 1};
}

/// The mask of vector v of a row that sees keys [first, end).
[[gnu::always_inline]] inline vint sees(int v, int first, int end) {
    const vint key = iota() + v * lanes;
    return (key >= first) & (key < end);
}

/// The first key in the window of query t.
inline int64_t window_start(const AttentionShape& shape, int64_t t) {
    return std::max<int64_t>(0, t + shape.S - shape.T + 1 - shape.window);
}

/// No query of a block sees a key before this one.
inline int64_t first_key(const AttentionShape& shape, int64_t b, int64_t t0, int rows) {
    const int64_t in_window = window_start(shape, t0);
    if (!shape.doc_start) return in_window;
    const int32_t* start = shape.doc_start + b * shape.T + t0;
    return std::max<int64_t>(in_window, *std::min_element(start, start + rows));
}

/// The operands of a tile's products, packed as each product says.
template <class Engine>
struct TileProduct {
    using Element = typename Engine::Element;
    using Word = typename Engine::Word;

    int rows;  // of the queries, padded
    int head;  // the size of a head, padded
    const Element *a, *b;
    float* c;

    const Word* a_words() const { return reinterpret_cast<const Word*>(a); }
    const Word* b_words() const { return reinterpret_cast<const Word*>(b); }
};

/// c [rows, tile] = factor·(a [rows, head]·b [head, tile]) for the vectors of each panel that some
/// query sees: scores, or dP. b has been packed by pack_transposed.
template <class Engine>
void multiply_visible(const Visibility<Engine>& view, TileProduct<Engine> p, float factor,
                      Prefetch& prefetch) {
    const int words = p.head / Engine::depth;
    for (int v = 0; v < tile / lanes; v += max_columns) {
        for (int r = 0; r < p.rows; r += Engine::panel) {
            const int begin = std::max(v, view.first_vector(r)),
                      columns = std::min(v + max_columns, view.vectors(r)) - begin;
            if (columns <= 0) continue;
            prefetch.some();
            multiply_columns<Engine, A::rows, C::scale>(
                columns, words, {p.a_words() + r * words, words},
                {p.b_words() + begin * lanes, tile}, {p.c + r * tile + begin * lanes, tile},
                &factor);
        }
    }
}

/// Caps what multiply_visible has computed: scores in units of log 2.
template <class Engine>
void cap_scores(const Visibility<Engine>& view, int rows, float* scores, const SoftCap& cap) {
    for (int r = 0; r < rows; ++r) {
        float* row = scores + r * tile;
        for (int v = view.first_vector(r); v < view.vectors(r); ++v)
            store(row + v * lanes, cap(load(row + v * lanes)));
    }
}

/// c[r, :] = rescale[r]·c[r, :] + Σ over visible keys of a[r, key]·b[key, :]: O, or dQ. a [rows,
/// tile]; b [tile, head] has been packed by pack_depth; c [rows, head].
template <class Engine>
void multiply_keys(const Visibility<Engine>& view, TileProduct<Engine> p, const float* rescale,
                   Prefetch& prefetch) {
    const int vectors = p.head / lanes;
    for (int v = 0; v < vectors; v += max_columns) {
        const int columns = std::min(max_columns, vectors - v);
        for (int r = 0; r < p.rows; r += Engine::panel) {
            const int keys = view.end(r + Engine::panel - 1);
            const int first = view.first_vector(r) * lanes / Engine::depth;
            const int words = std::max(0, (keys + Engine::depth - 1) / Engine::depth - first);
            prefetch.some();
            multiply_columns<Engine, A::rows, C::accumulate>(
                columns, words,
                {p.a_words() + r * (tile / Engine::depth) + first, tile / Engine::depth},
                {p.b_words() + first * p.head + v * lanes, p.head},
                {p.c + r * p.head + v * lanes, p.head}, rescale ? rescale + r : nullptr);
        }
    }
}

/// c[key, :] += Σ over rows that see the key of a[r, key]·b[r, :]: dV, or dK. a [rows, tile] and b
/// [rows, head] are packed as by pack_depth; c [tile, head].
template <class Engine>
void multiply_rows(const Visibility<Engine>& view, TileProduct<Engine> p, Prefetch& prefetch) {
    const int vectors = p.head / lanes;
    for (int v = 0; v < vectors; v += max_columns) {
        const int columns = std::min(max_columns, vectors - v);
        for (int key = 0; key < view.keys; key += Engine::panel) {
            const int first = view.first_row(key) / Engine::depth;
            const int end = view.end_row(key + Engine::panel - 1, p.rows);
            const int words = static_cast<int>(round_up(end, Engine::depth)) / Engine::depth;
            if (first >= words) continue;
            prefetch.some();
            multiply_columns<Engine, A::columns, C::accumulate>(
                columns, words - first, {p.a_words() + first * tile + key, tile},
                {p.b_words() + first * p.head + v * lanes, p.head},
                {p.c + key * p.head + v * lanes, p.head}, nullptr);
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

}  // namespace train_gpt::cpu
