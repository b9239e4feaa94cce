// The forward pass of attention on the CPU, for a block of queries.
#include <algorithm>
#include <cmath>

#include "kernels/attention/amx.h"
#include "kernels/attention/cpu.h"
#include "kernels/attention/sink.h"

namespace train_gpt::cpu {

namespace {

template <class Engine>
struct ForwardScratch {
    using Element = typename Engine::Element;
    Element *q, *key_rows, *key_columns, *values;
    float *out, *scores, *row_max, *row_sum, *rescale;

    ForwardScratch(Pieces& pieces, const AttentionShape& shape) {
        const int64_t rows = block_height<Engine>(shape.T), head = padded_head<Engine>(shape.D);
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

/// One online-softmax step of a tile: scores (in units of log 2) become probabilities relative to
/// the rows' new maxima. Sums over earlier keys must be multiplied by rescale[r]. bf16 rows
/// overwrite the scores row by row.
template <class Engine, bool whole>
void softmax_step(const Visibility<Engine>& view, int rows, float* scores, float* row_max,
                  float* row_sum, float* rescale) {
    constexpr bool coarse = Engine::depth > 1;
    for (int r0 = 0; r0 < rows; r0 += lanes) {
        vfloat largest[lanes];
        for (int i = 0; i < lanes; ++i) {
            const int r = r0 + i;
            largest[i] = all(minus_infinity);
            if (r >= rows) continue;
            float* row = scores + r * tile;
            const int end = whole ? tile : view.end(r), first = whole ? 0 : view.first(r),
                      begin = whole ? 0 : view.first_vector(r),
                      vectors = whole ? tile / lanes : view.vectors(r);
            for (int v = begin; v < vectors; ++v) {
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
        // As long as a row has seen no key, its maximum is −∞; any finite reference gives the zeros
        // that it needs.
        const vfloat reference = new_max == minus_infinity ? vfloat{} : new_max;
        store(row_max + r0, new_max);
        store(rescale + r0, exp2<false>(old_max - reference));

        alignas(64) float references[lanes];
        store(references, reference);
        for (int i = 0; i < lanes && r0 + i < rows; ++i) {
            const int r = r0 + i;
            float* row = scores + r * tile;
            const int begin = whole ? 0 : view.first_vector(r),
                      vectors = whole ? tile / lanes : view.vectors(r);
            vfloat sum = load(row_sum + r * lanes) * rescale[r];
            // Not contracted with the first addition where the loop is unrolled: a tile's bits do
            // not depend on whether it is whole.
            keep_in_register(sum);
            if constexpr (Engine::depth == 1) {
                for (int v = begin; v < vectors; ++v) {
                    const vfloat p = exp2<coarse>(load(row + v * lanes) - references[i]);
                    sum += p;
                    store(row + v * lanes, p);
                }
            } else {
#if TRAIN_GPT_BF16_PAIRS
                bf16* packed = reinterpret_cast<bf16*>(scores) + r * tile;
                for (int v = begin; v < vectors; v += 2) {
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

}  // namespace

template <class Engine, class Storage>
void forward_block(const AttentionForward& args, const ForwardBlock& block,
                   const ForwardBlock* next, char* memory) {
    using Element = typename Engine::Element;
    const AttentionShape& shape = args.shape;
    Pieces pieces(memory);
    const ForwardScratch<Engine> my(pieces, shape);
    [[maybe_unused]] const typename Engine::Setup setup{};

    const auto [b, h, t0] = block;
    const int64_t group = shape.H / shape.H_kv, h_kv = h / group, offset = shape.S - shape.T;
    const int D = shape.D, head = padded_head<Engine>(D);
    const int rows = static_cast<int>(std::min<int64_t>(block_rows, shape.T - t0));
    const int padded_rows = static_cast<int>(round_up(rows, Engine::unit));

    pack_rows(my.q, head, rows_at<const Storage>(args.q, b, t0, h), rows, padded_rows, D);
    std::fill_n(my.row_max, padded_rows, minus_infinity);
    std::fill_n(my.row_sum, padded_rows * lanes, 0.0f);
    std::fill_n(my.out, static_cast<int64_t>(padded_rows) * head, 0.0f);

    Prefetch prefetch;
    if (next) {
        const int64_t key = window_start(shape, next->t0) / tile * tile,
                      keys = std::min<int64_t>(tile, shape.S - key);
        prefetch.add<Storage>(args.k, next->b, key, next->h / group, keys, D);
        prefetch.add<Storage>(args.v, next->b, key, next->h / group, keys, D);
        prefetch.add<Storage>(args.q, next->b, next->t0, next->h,
                              std::min<int64_t>(block_rows, shape.T - next->t0), D);
    }
    prefetch.add<Storage>(args.out, b, t0, h, rows, D);

    const int64_t keys_end = t0 + rows + offset;
    for (int64_t key0 = first_key(shape, b, t0, rows) / tile * tile; key0 < keys_end;
         key0 += tile) {
        const int keys = static_cast<int>(std::min<int64_t>(tile, keys_end - key0));
        const int padded_keys = static_cast<int>(round_up(keys, Engine::unit));
        pack_rows(my.key_rows, head, rows_at<const Storage>(args.k, b, key0, h_kv), keys,
                  padded_keys, D);
        pack_transposed(reinterpret_cast<float*>(my.key_columns), tile,
                        reinterpret_cast<const float*>(my.key_rows), head / Engine::depth,
                        padded_keys);
        Element* value_rows = Engine::depth > 1 ? my.key_rows : my.values;
        pack_rows(value_rows, head, rows_at<const Storage>(args.v, b, key0, h_kv), keys,
                  padded_keys, D);
        const Element* values = pack_depth(my.values, value_rows, padded_keys, head);
        const int64_t after = key0 + tile;
        prefetch.add<Storage>(args.v, b, after, h_kv, std::min<int64_t>(tile, keys_end - after), D);
        prefetch.add<Storage>(args.k, b, after, h_kv, std::min<int64_t>(tile, keys_end - after), D);

        for (int r0 = 0; r0 < rows; r0 += tile) {
            const int here = std::min(tile, padded_rows - r0);
            const auto view =
                visibility<Engine>(shape, b, t0 + r0, std::min(here, rows - r0), key0, keys);
            if (view.empty()) continue;
            multiply_visible<Engine>(view,
                                     {here, head, my.q + r0 * head, my.key_columns, my.scores},
                                     shape.scale * log2_e, prefetch);
            if (shape.softcap != 0) cap_scores(view, here, my.scores, SoftCap(shape.softcap));
            const auto softmax =
                view.whole() ? softmax_step<Engine, true> : softmax_step<Engine, false>;
            softmax(view, here, my.scores, my.row_max + r0, my.row_sum + r0 * lanes, my.rescale);
            multiply_keys<Engine>(view,
                                  {here, head, reinterpret_cast<const Element*>(my.scores), values,
                                   my.out + r0 * head},
                                  my.rescale, prefetch);
        }
    }

    const Sink sink(args.sinks, h);
    for (int r0 = 0; r0 < rows; r0 += lanes) {
        vfloat sums[lanes];
        for (int i = 0; i < lanes; ++i) sums[i] = load(my.row_sum + (r0 + i) * lanes);
        alignas(64) float total[lanes];
        store(total, reduce_rows(sums, take_sum));
        for (int i = 0; i < lanes && r0 + i < rows; ++i) {
            const int r = r0 + i;
            const RowEnd end = sink.end_row(my.row_max[r], total[i]);
            write_row(at<Storage>(args.out, b, t0 + r, h), my.out + r * head, end.factor, D);
            if (args.lse) args.lse[(b * shape.H + h) * shape.T + t0 + r] = end.lse;
        }
    }
}

template <class Engine>
size_t forward_block_bytes(const AttentionShape& shape) {
    Pieces pieces(nullptr);
    ForwardScratch<Engine>(pieces, shape);
    return pieces.used();
}

template void forward_block<Fp32, float>(const AttentionForward&, const ForwardBlock&,
                                         const ForwardBlock*, char*);
template size_t forward_block_bytes<Fp32>(const AttentionShape&);
#if TRAIN_GPT_BF16_PAIRS && !TRAIN_GPT_AMX
template void forward_block<Bf16Pairs, bf16>(const AttentionForward&, const ForwardBlock&,
                                             const ForwardBlock*, char*);
template size_t forward_block_bytes<Bf16Pairs>(const AttentionShape&);
#else
template void forward_block<Fp32, bf16>(const AttentionForward&, const ForwardBlock&,
                                        const ForwardBlock*, char*);
#endif
#if TRAIN_GPT_AMX
template void forward_block<Amx, bf16>(const AttentionForward&, const ForwardBlock&,
                                       const ForwardBlock*, char*);
template size_t forward_block_bytes<Amx>(const AttentionShape&);
#endif

}  // namespace train_gpt::cpu
