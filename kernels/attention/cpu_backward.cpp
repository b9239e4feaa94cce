// The backward pass of attention on the CPU, for a range of queries and keys.
#include <algorithm>

#include "kernels/attention/amx.h"
#include "kernels/attention/cpu.h"
#include "kernels/attention/sink.h"

namespace train_gpt::cpu {

namespace {

template <class Engine>
struct BackwardScratch {
    using Element = typename Engine::Element;
    Element *q, *q_deep, *dout, *dout_deep, *key_rows, *key_columns, *keys_deep, *value_rows,
        *value_columns;
    Element *p_columns, *ds_rows, *ds_columns;
    float *dq, *dk, *dv, *gradients, *scores, *dp, *delta, *lse;

    /// keys: the number of keys whose gradients one thread accumulates at a time.
    BackwardScratch(Pieces& pieces, const AttentionShape& shape, int64_t keys) {
        constexpr bool paired = Engine::depth > 1;
        const int64_t rows = block_height<Engine>(shape.T), head = padded_head<Engine>(shape.D);
        q = pieces.take<Element>(rows * head);
        dout = pieces.take<Element>(rows * head);
        q_deep = pieces.take<Element>(paired ? round_up(rows, tile) * head : 0);
        dout_deep = pieces.take<Element>(paired ? round_up(rows, tile) * head : 0);
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
        gradients = pieces.take<float>(Engine::transposed_sums ? tile * head : 0);
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

/// factor·sums becomes, or is added to, rows of dk or dv. sums [count, head].
template <class Storage>
void store_gradients(const AttentionBackward& args, const HeadsView& to, const KeyRows& rows,
                     const float* sums, int head, float factor) {
    const int D = args.shape.D;
    if (args.key_gradients == KeyGradients::write) {
        write_rows(rows_at<Storage>(to, rows.b, rows.key0, rows.h_kv), {sums, head}, factor,
                   rows.count, D);
        return;
    }
    const auto dst = rows_at<float>(to, rows.b, rows.key0, rows.h_kv);
    if (args.key_gradients == KeyGradients::add_fp32)
        add_rows(dst, {sums, head}, factor, rows.count, D);
    else
        write_rows(dst, {sums, head}, factor, rows.count, D);
}

/// P = 2^(scores − lse) and dS = P ⊙ (dP − δ), with a soft-cap times its slope, in place of scores
/// and dP.
template <class Engine, bool whole>
void softmax_backward_step(const Visibility<Engine>& view, int rows,
                           const BackwardScratch<Engine>& my, const float* lse, const float* delta,
                           float softcap) {
    constexpr bool coarse = Engine::depth > 1;
    const SoftCap cap(softcap);
    for (int r = 0; r < rows; r += Engine::depth) {
        const int begin = whole ? 0 : view.first_vector(r),
                  vectors = whole ? tile / lanes : view.vectors(r);
        // If a row has an odd number of vectors, the last one is paired with zeros.
        [[maybe_unused]] vfloat ds_of[Engine::depth][tile / lanes] = {};
        for (int v = begin; v < vectors; ++v) {
            vfloat p[Engine::depth], ds[Engine::depth];
            for (int i = 0; i < Engine::depth; ++i) {
                const int at = (r + i) * tile + v * lanes;
                p[i] = exp2<coarse>(load(my.scores + at) - lse[r + i]);
                ds[i] = p[i] * (load(my.dp + at) - delta[r + i]);
                if (softcap != 0) ds[i] *= cap.slope(load(my.scores + at));
                const int end = whole ? tile : view.end(r + i),
                          first = whole ? 0 : view.first(r + i);
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
                for (int v = begin; v < vectors; v += 2) {
                    store_probabilities(my.ds_rows + (r + i) * tile, v, ds_of[i][v],
                                        ds_of[i][v + 1]);
                }
            }
        }
#endif
    }
}

/// The gradients of a range, in the memory of one thread. Blocks of queries are the outer loop,
/// tiles of keys the inner one.
template <class Engine, class Storage, bool want_dq, bool want_dkv>
class RangeBackward {
  public:
    RangeBackward(const AttentionBackward& args, const BackwardRange& range, char* memory,
                  float* sink_sums)
        : args_(args),
          shape_(args.shape),
          range_(range),
          sink_sums_(sink_sums),
          pieces_(memory),
          my_(pieces_, shape_, want_dkv ? range.s1 - range.s0 : 0) {}

    void run(const BackwardRange* next) {
        if (want_dkv) {
            const int64_t keys = round_up(range_.s1 - range_.s0, tile);
            std::fill_n(my_.dk, keys * head_, 0.0f);
            std::fill_n(my_.dv, keys * head_, 0.0f);
        }
        for (int64_t h = range_.h0; h < range_.h1; ++h)
            for (int64_t t0 = range_.t0; t0 < range_.t1; t0 += block_rows) {
                const bool last_of_head = t0 + block_rows >= range_.t1,
                           last = last_of_head && h + 1 == range_.h1;
                Prefetch prefetch;
                if (!last)
                    expect_block(prefetch, range_, last_of_head ? h + 1 : h,
                                 last_of_head ? range_.t0 : t0 + block_rows);
                else if (next)
                    expect_block(prefetch, *next, next->h0, next->t0);
                const Queries queries = load_queries(h, t0, prefetch);
                add_block(queries, want_dkv && last, prefetch);
                if (want_dq)
                    write_rows(rows_at<Storage>(args_.dq, range_.b, t0, h), {my_.dq, head_},
                               shape_.scale, queries.rows, shape_.D);
            }
    }

  private:
    using Element = typename Engine::Element;

    /// A block of queries that has been packed.
    struct Queries {
        int64_t h, t0;
        int rows, padded_rows;
        const Element *q_deep, *dout_deep;  // for the gradients of keys
    };
    /// A tile of keys that has been packed.
    struct Keys {
        int64_t key0;
        int count;
        const Element* deep;
        float *dk, *dv;  // the sums of its gradients: [tile, head], or [head, tile]
    };

    /// Prefetches the first operands of a block of queries of a range.
    void expect_block(Prefetch& prefetch, const BackwardRange& range, int64_t h, int64_t t0) const {
        const int D = shape_.D;
        const int64_t rows = std::min<int64_t>(block_rows, range.t1 - t0),
                      key0 = std::max(range.s0, window_start(shape_, t0) / tile * tile),
                      keys = std::min<int64_t>(tile, std::min(range.t1 + offset_, range.s1) - key0);
        prefetch.add<Storage>(args_.v, range.b, key0, h / group_, keys, D);
        prefetch.add<Storage>(args_.k, range.b, key0, h / group_, keys, D);
        prefetch.add<Storage>(args_.out, range.b, t0, h, rows, D);
        prefetch.add<Storage>(args_.dout, range.b, t0, h, rows, D);
        prefetch.add<Storage>(args_.q, range.b, t0, h, rows, D);
    }

    /// Packs q and dout, and computes δ = Σ dout ⊙ out and lse·log2 e of each row.
    Queries load_queries(int64_t h, int64_t t0, Prefetch& prefetch) {
        const int64_t b = range_.b;
        const int D = shape_.D,
                  rows = static_cast<int>(std::min<int64_t>(block_rows, range_.t1 - t0)),
                  padded_rows = static_cast<int>(round_up(rows, Engine::unit));
        if (want_dq) prefetch.add<Storage>(args_.dq, b, t0, h, rows, D);
        const auto dout = rows_at<const Storage>(args_.dout, b, t0, h);
        pack_rows(my_.q, head_, rows_at<const Storage>(args_.q, b, t0, h), rows, padded_rows, D);
        pack_rows(my_.dout, head_, dout, rows, padded_rows, D);
        const Element* q_deep = pack_for_keys(my_.q_deep, my_.q, padded_rows);
        const Element* dout_deep = pack_for_keys(my_.dout_deep, my_.dout, padded_rows);
        std::fill_n(my_.delta, padded_rows, 0.0f);
        std::fill_n(my_.lse, padded_rows, 0.0f);
        row_products(my_.delta, rows_at<const Storage>(args_.out, b, t0, h), dout, rows, D);
        for (int r = 0; r < rows; ++r)
            my_.lse[r] = args_.lse[(b * shape_.H + h) * shape_.T + t0 + r] * log2_e;
        if (want_dq && sink_sums_) add_up_sink(h, t0, static_cast<int>(rows));
        if (want_dq) std::fill_n(my_.dq, static_cast<int64_t>(padded_rows) * head_, 0.0f);
        return {h, t0, rows, padded_rows, q_deep, dout_deep};
    }

    /// The share of a block of queries in the gradient of its head's sink.
    void add_up_sink(int64_t h, int64_t t0, int rows) const {
        const Sink sink(args_.sinks, h);
        vfloat sum = {};
        for (int r = 0; r < rows; r += lanes) {
            const vfloat p = exp2<false>(sink.log2 - load(my_.lse + r));
            sum += sees(0, 0, rows - r) ? p * load(my_.delta + r) : vfloat{};
        }
        float total = 0;
        for (int i = 0; i < lanes; ++i) total += sum[i];
        const int64_t blocks = (shape_.T + block_rows - 1) / block_rows;
        sink_sums_[(range_.b * shape_.H + h) * blocks + t0 / block_rows] = total;
    }

    /// Rows of queries as the operand of multiply_rows.
    const Element* pack_for_keys(Element* dst, const Element* rows, int count) const {
        if constexpr (Engine::transposed_sums) {
            pack_columns(dst, my_.keys_deep, rows, count, head_);
            return dst;
        } else {
            return pack_depth(dst, rows, count, head_);
        }
    }

    /// The sums of a tile of keys, [tile, head].
    const float* by_keys(const float* sums) const {
        if constexpr (!Engine::transposed_sums) return sums;
        pack_transposed(my_.gradients, head_, sums, tile, head_);
        return my_.gradients;
    }

    /// Adds what a block of queries contributes. The last block of the range visits all its keys,
    /// seen or not, because it completes their gradients and writes them.
    void add_block(const Queries& queries, bool finish, Prefetch& prefetch) {
        const int64_t keys_begin = std::max(
            range_.s0, first_key(shape_, range_.b, queries.t0, queries.rows) / tile * tile);
        const int64_t keys_end = std::min(range_.s1, queries.t0 + queries.rows + offset_);
        for (int64_t key0 = finish ? range_.s0 : keys_begin; key0 < (finish ? range_.s1 : keys_end);
             key0 += tile) {
            const KeyRows finished{range_.b, key0, range_.h_kv,
                                   static_cast<int>(std::min<int64_t>(tile, range_.s1 - key0))};
            if (finish) {
                expect_gradients<Storage>(prefetch, args_, args_.dv, finished);
                expect_gradients<Storage>(prefetch, args_, args_.dk, finished);
            }
            float *dk = my_.dk + (key0 - range_.s0) * head_,
                  *dv = my_.dv + (key0 - range_.s0) * head_;
            if (key0 >= keys_begin && key0 < keys_end) {
                const Keys keys = load_keys(key0, keys_end, prefetch, dk, dv);
                for (int r0 = 0; r0 < queries.rows; r0 += tile)
                    add_tile(queries, r0, keys, prefetch);
            }
            if (finish) {
                store_gradients<Storage>(args_, args_.dk, finished, by_keys(dk), head_,
                                         shape_.scale);
                store_gradients<Storage>(args_, args_.dv, finished, by_keys(dv), head_, 1.0f);
            }
        }
    }

    /// Packs a tile of keys and values, and prefetches the next one.
    Keys load_keys(int64_t key0, int64_t keys_end, Prefetch& prefetch, float* dk, float* dv) {
        const int64_t b = range_.b, h_kv = range_.h_kv;
        const int D = shape_.D, count = static_cast<int>(std::min<int64_t>(tile, keys_end - key0)),
                  padded = static_cast<int>(round_up(count, Engine::unit));
        pack_rows(my_.key_rows, head_, rows_at<const Storage>(args_.k, b, key0, h_kv), count,
                  padded, D);
        pack_rows(my_.value_rows, head_, rows_at<const Storage>(args_.v, b, key0, h_kv), count,
                  padded, D);
        pack_transposed(reinterpret_cast<float*>(my_.key_columns), tile,
                        reinterpret_cast<const float*>(my_.key_rows), words_, padded);
        pack_transposed(reinterpret_cast<float*>(my_.value_columns), tile,
                        reinterpret_cast<const float*>(my_.value_rows), words_, padded);
        const Element* deep = pack_depth(my_.keys_deep, my_.key_rows, padded, head_);
        const int64_t after = key0 + tile, more = std::min<int64_t>(tile, keys_end - after);
        prefetch.add<Storage>(args_.v, b, after, h_kv, more, D);
        prefetch.add<Storage>(args_.k, b, after, h_kv, more, D);
        return {key0, count, deep, dk, dv};
    }

    /// Queries r0 … of a block with a tile of keys: S and dP, P and dS, then dV, dK and dQ.
    void add_tile(const Queries& queries, int r0, const Keys& keys, Prefetch& prefetch) {
        const int64_t t0 = queries.t0, key0 = keys.key0;
        const int here = std::min(tile, queries.padded_rows - r0);
        const auto view = visibility<Engine>(shape_, range_.b, t0 + r0,
                                             std::min(here, queries.rows - r0), key0, keys.count);
        if (view.empty()) return;
        multiply_visible<Engine>(view,
                                 {here, head_, my_.q + r0 * head_, my_.key_columns, my_.scores},
                                 shape_.scale * log2_e, prefetch);
        if (shape_.softcap != 0) cap_scores(view, here, my_.scores, SoftCap(shape_.softcap));
        multiply_visible<Engine>(
            view, {here, head_, my_.dout + r0 * head_, my_.value_columns, my_.dp}, 1.0f, prefetch);
        const auto softmax_backward = view.whole() ? softmax_backward_step<Engine, true>
                                                   : softmax_backward_step<Engine, false>;
        softmax_backward(view, here, my_, my_.lse + r0, my_.delta + r0, shape_.softcap);

        const Element *p_columns = my_.p_columns, *ds_columns = my_.ds_columns,
                      *ds_rows = my_.ds_rows;
        if constexpr (Engine::depth == 1) {
            p_columns = my_.scores;
            ds_columns = ds_rows = my_.dp;
        }
        if (want_dkv) {
            multiply_rows<Engine>(
                view, {here, head_, p_columns, queries.dout_deep + r0 * head_, keys.dv}, prefetch);
            multiply_rows<Engine>(
                view, {here, head_, ds_columns, queries.q_deep + r0 * head_, keys.dk}, prefetch);
        }
        if (want_dq)
            multiply_keys<Engine>(view, {here, head_, ds_rows, keys.deep, my_.dq + r0 * head_},
                                  nullptr, prefetch);
    }

    const AttentionBackward& args_;
    const AttentionShape& shape_;
    const BackwardRange& range_;
    float* const sink_sums_;
    Pieces pieces_;
    const BackwardScratch<Engine> my_;
    [[no_unique_address]] const typename Engine::Setup setup_{};
    const int64_t group_ = shape_.H / shape_.H_kv,
                  offset_ = shape_.S - shape_.T;  // the position of query 0
    const int head_ = padded_head<Engine>(shape_.D), words_ = head_ / Engine::depth;
};

}  // namespace

template <class Engine, class Storage, bool want_dq, bool want_dkv>
void backward_range(const AttentionBackward& args, const BackwardRange& range,
                    const BackwardRange* next, char* memory, float* sink_sums) {
    RangeBackward<Engine, Storage, want_dq, want_dkv>(args, range, memory, sink_sums).run(next);
}

template <class Engine>
size_t backward_range_bytes(const AttentionShape& shape, int64_t keys) {
    Pieces pieces(nullptr);
    BackwardScratch<Engine>(pieces, shape, keys);
    return pieces.used();
}

#define TRAIN_GPT_INSTANTIATE(Engine, Storage)                                                \
    template void backward_range<Engine, Storage, true, true>(                                \
        const AttentionBackward&, const BackwardRange&, const BackwardRange*, char*, float*); \
    template void backward_range<Engine, Storage, true, false>(                               \
        const AttentionBackward&, const BackwardRange&, const BackwardRange*, char*, float*); \
    template void backward_range<Engine, Storage, false, true>(                               \
        const AttentionBackward&, const BackwardRange&, const BackwardRange*, char*, float*);

TRAIN_GPT_INSTANTIATE(Fp32, float)
template size_t backward_range_bytes<Fp32>(const AttentionShape&, int64_t);
#if TRAIN_GPT_BF16_PAIRS && !TRAIN_GPT_AMX
TRAIN_GPT_INSTANTIATE(Bf16Pairs, bf16)
template size_t backward_range_bytes<Bf16Pairs>(const AttentionShape&, int64_t);
#else
TRAIN_GPT_INSTANTIATE(Fp32, bf16)
#endif
#if TRAIN_GPT_AMX
TRAIN_GPT_INSTANTIATE(Amx, bf16)
template size_t backward_range_bytes<Amx>(const AttentionShape&, int64_t);
#endif

}  // namespace train_gpt::cpu
