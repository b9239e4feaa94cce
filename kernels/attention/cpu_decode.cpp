// The forward pass of attention on the CPU, for the few queries of a step of generation.
#include <algorithm>
#include <cmath>

#include "kernels/attention/cpu.h"
#include "kernels/attention/sink.h"
#include "kernels/attention/tile_products.h"

namespace train_gpt::cpu {

namespace {

struct DecodeScratch {
    float *k, *v;
    DecodeScratch(Pieces& pieces, const AttentionShape& shape) {
        k = pieces.take<float>(tile * padded_head<Fp32>(shape.D));
        v = pieces.take<float>(tile * padded_head<Fp32>(shape.D));
    }
};

/// acc[c] += Σ weights[j]·row j, for rows first … end − 1 and `columns` vectors, at most 4, of
/// each.
template <class T>
void add_rows(vfloat (&acc)[4], int columns, const float* weights, Rows<const T> rows, int first,
              int end) {
    const T* row = rows.row(first);
    if (columns == 4) {
        for (int j = first; j < end; ++j, row += rows.stride) {
#pragma GCC unroll 4
            for (int c = 0; c < 4; ++c) acc[c] += weights[j] * load_unaligned(row + c * lanes);
        }
    } else {
        for (int j = first; j < end; ++j, row += rows.stride)
            for (int c = 0; c < columns; ++c)
                acc[c] += weights[j] * load_unaligned(row + c * lanes);
    }
}

}  // namespace

template <class Storage>
void forward_query(const AttentionForward& args, int64_t b, int64_t h, int64_t t, char* memory) {
    const AttentionShape& shape = args.shape;
    Pieces pieces(memory);
    const DecodeScratch my(pieces, shape);
    const int64_t h_kv = h / (shape.H / shape.H_kv), position = t + shape.S - shape.T;
    const int D = shape.D, head = padded_head<Fp32>(D), vectors = head / lanes;
    const int64_t first = first_key(shape, b, t, 1);

    alignas(64) float q[max_head], out[max_head], scores[tile];
    convert(q, at<const Storage>(args.q, b, t, h), D);
    for (int d = 0; d < D; ++d) q[d] *= shape.scale * log2_e;
    std::fill(q + D, q + head, 0.0f);
    std::fill(out, out + head, 0.0f);

    float row_max = minus_infinity;
    vfloat sum = {};
    const auto attend = [&]<class T>(Rows<const T> k, Rows<const T> v, int skip, int keys) {
        for (int j = 0; j < keys; j += lanes) {
            vfloat products[lanes];
            for (int i = 0; i < lanes; ++i) {
                const T* row = k.row(std::min(j + i, keys - 1));
                vfloat dot = load(q) * load_unaligned(row);
                for (int n = 1; n < vectors; ++n)
                    dot += load(q + n * lanes) * load_unaligned(row + n * lanes);
                products[i] = dot;
            }
            vfloat s = reduce_rows(products, take_sum);
            if (shape.softcap != 0) s = SoftCap(shape.softcap)(s);
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
            add_rows(acc, columns, scores, v.from_column(n * lanes), skip, keys);
            for (int c = 0; c < columns; ++c) store(out + (n + c) * lanes, acc[c]);
        }
    };

    for (int64_t key0 = first / tile * tile; key0 <= position; key0 += tile) {
        const int keys = static_cast<int>(std::min<int64_t>(tile, position + 1 - key0));
        const int skip = static_cast<int>(std::max<int64_t>(0, first - key0));
        const auto k = rows_at<const Storage>(args.k, b, key0, h_kv),
                   v = rows_at<const Storage>(args.v, b, key0, h_kv);
        if (D == head) {
            attend(k, v, skip, keys);
        } else {
            pack_rows(my.k, head, k, keys, keys, D);
            pack_rows(my.v, head, v, keys, keys, D);
            attend(Rows<const float>{my.k, head}, Rows<const float>{my.v, head}, skip, keys);
        }
    }
    float total = 0;
    for (int i = 0; i < lanes; ++i) total += sum[i];
    const RowEnd end = Sink(args.sinks, h).end_row(row_max, total);
    write_row(at<Storage>(args.out, b, t, h), out, end.factor, D);
    if (args.lse) args.lse[(b * shape.H + h) * shape.T + t] = end.lse;
}

size_t forward_query_bytes(const AttentionShape& shape) {
    Pieces pieces(nullptr);
    DecodeScratch(pieces, shape);
    return pieces.used();
}

template void forward_query<float>(const AttentionForward&, int64_t, int64_t, int64_t, char*);
template void forward_query<bf16>(const AttentionForward&, int64_t, int64_t, int64_t, char*);

}  // namespace train_gpt::cpu
