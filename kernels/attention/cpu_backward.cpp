// The backward pass of attention on the CPU, for a range of queries and keys.
#include <algorithm>

#include "kernels/attention/cpu.h"
#include "kernels/attention/tile_products.h"

namespace train_gpt::cpu {

namespace {

template <class Engine>
struct BackwardScratch {
    using Element = typename Engine::Element;
    Element *q, *q_deep, *dout, *dout_deep, *key_rows, *key_columns, *keys_deep, *value_rows,
        *value_columns;
    Element *p_columns, *ds_rows, *ds_columns;
    float *dq, *dk, *dv, *scores, *dp, *delta, *lse;

    /// keys: the number of keys whose gradients one thread accumulates at a time.
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

/// Keys [key0, key0 + count) of a key head.
struct KeyRows {
    int64_t b, key0, h_kv;
    int count;
};

/// Prefetches rows of dk or dv.
template <class Storage>
void expect_gradients(Prefetch& prefetch, const AttentionBackward& args, const HeadsView& to,
                      const KeyRows& rows) {
    const int D = args.shape.D;
    if (args.key_gradients == KeyGradients::write)
        prefetch.add<Storage>(to, rows.b, rows.key0, rows.h_kv, rows.count, D);
    else
        prefetch.add<float>(to, rows.b, rows.key0, rows.h_kv, rows.count, D);
}

/// factor·sums becomes, or is added to, rows of dk or dv.
template <class Storage>
void store_gradients(const AttentionBackward& args, const HeadsView& to, const KeyRows& rows,
                     const float* sums, float factor) {
    const int D = args.shape.D, head = padded_head(D);
    if (args.key_gradients == KeyGradients::write) {
        write_rows(at<Storage>(to, rows.b, rows.key0, rows.h_kv), to.token, sums, head, factor,
                   rows.count, D);
        return;
    }
    float* dst = at<float>(to, rows.b, rows.key0, rows.h_kv);
    if (args.key_gradients == KeyGradients::add_fp32)
        add_rows(dst, to.token, sums, head, factor, rows.count, D);
    else
        write_rows(dst, to.token, sums, head, factor, rows.count, D);
}

/// P = 2^(scores − lse) and dS = P ⊙ (dP − δ), in place of scores and dP.
template <class Engine>
void softmax_backward_step(const Visibility& view, int rows, const BackwardScratch<Engine>& my,
                           const float* lse, const float* delta) {
    constexpr bool coarse = Engine::depth > 1;
    for (int r = 0; r < rows; r += Engine::depth) {
        const int vectors = view.vectors(r / panel * panel);
        // If a row has an odd number of vectors, the last one is paired with zeros.
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

}  // namespace

template <class Engine, class Storage, bool want_dq, bool want_dkv>
void backward_range(const AttentionBackward& args, const BackwardRange& range,
                    const BackwardRange* next, char* memory) {
    using Element = typename Engine::Element;
    const AttentionShape& shape = args.shape;
    Pieces pieces(memory);
    const BackwardScratch<Engine> my(pieces, shape, want_dkv ? range.s1 - range.s0 : 0);
    const int64_t b = range.b, h_kv = range.h_kv, group = shape.H / shape.H_kv,
                  offset = shape.S - shape.T;  // the position of query 0
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
            const int64_t keys_end = std::min(range.s1, t0 + rows + offset);
            const bool last_of_head = t0 + block_rows >= range.t1,
                       last = last_of_head && h + 1 == range.h1;

            Prefetch prefetch;
            const auto expect_block = [&](int64_t b2, int64_t h2, int64_t t2, int64_t end,
                                          int64_t s2) {
                const int64_t more = std::min<int64_t>(block_rows, end - t2),
                              keys = std::min<int64_t>(tile, end + offset - s2);
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

            // The last block visits all keys of the range, seen or not, because it completes their
            // gradients and writes them.
            const bool finish = want_dkv && last;
            for (int64_t key0 = finish ? range.s0 : keys_begin;
                 key0 < (finish ? range.s1 : keys_end); key0 += tile) {
                float* dk = my.dk + (key0 - range.s0) * head;
                float* dv = my.dv + (key0 - range.s0) * head;
                const KeyRows finished{b, key0, h_kv,
                                       static_cast<int>(std::min<int64_t>(tile, range.s1 - key0))};
                if (finish) {
                    expect_gradients<Storage>(prefetch, args, args.dv, finished);
                    expect_gradients<Storage>(prefetch, args, args.dk, finished);
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
                            t0 + r0 + offset - key0, std::min(here, rows - r0), keys,
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
                    store_gradients<Storage>(args, args.dk, finished, dk, shape.scale);
                    store_gradients<Storage>(args, args.dv, finished, dv, 1.0f);
                }
            }
            if (want_dq) {
                write_rows(at<Storage>(args.dq, b, t0, h), args.dq.token, my.dq, head, shape.scale,
                           rows, D);
            }
        }
    }
}

template <class Engine>
size_t backward_range_bytes(const AttentionShape& shape, int64_t keys) {
    Pieces pieces(nullptr);
    BackwardScratch<Engine>(pieces, shape, keys);
    return pieces.used();
}

template void backward_range<Fp32, float, true, true>(const AttentionBackward&,
                                                      const BackwardRange&, const BackwardRange*,
                                                      char*);
template void backward_range<Fp32, float, true, false>(const AttentionBackward&,
                                                       const BackwardRange&, const BackwardRange*,
                                                       char*);
template void backward_range<Fp32, float, false, true>(const AttentionBackward&,
                                                       const BackwardRange&, const BackwardRange*,
                                                       char*);
template void backward_range<EngineOfBf16, bf16, true, true>(const AttentionBackward&,
                                                             const BackwardRange&,
                                                             const BackwardRange*, char*);
template void backward_range<EngineOfBf16, bf16, true, false>(const AttentionBackward&,
                                                              const BackwardRange&,
                                                              const BackwardRange*, char*);
template void backward_range<EngineOfBf16, bf16, false, true>(const AttentionBackward&,
                                                              const BackwardRange&,
                                                              const BackwardRange*, char*);
template size_t backward_range_bytes<Fp32>(const AttentionShape&, int64_t);
#if TRAIN_GPT_BF16_PAIRS
template size_t backward_range_bytes<Bf16Pairs>(const AttentionShape&, int64_t);
#endif

}  // namespace train_gpt::cpu
