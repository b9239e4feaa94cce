#include "kernels/layernorm.h"

#include <algorithm>
#include <cmath>

#include "device/profile.h"
#include "kernels/lanes.h"

namespace train_gpt {

namespace {

// Column sums are taken per block of rows and the blocks are then added in order, so the result
// does not depend on which thread took which block. With 32 rows per block, the blocks' own traffic
// is small compared with that of the rows; the limit of 256 blocks bounds the scratch memory.
constexpr int64_t min_block_rows = 32, max_blocks = 256;

int64_t rows_per_block(int64_t M) {
    return std::max(min_block_rows, (M + max_blocks - 1) / max_blocks);
}
int64_t block_count(int64_t M) { return (M + rows_per_block(M) - 1) / rows_per_block(M); }

template <class T>
void forward(const LayerNormForward& args) {
    const int64_t M = args.x.rows(), C = args.x.cols();
    const T *x = args.x.as<T>(), *w = args.w.as<T>(), *b = args.b.as<T>();
    T* out = args.out.as<T>();
    float* stats = args.stats ? args.stats.as<float>() : nullptr;
    const float epsilon = args.epsilon;

#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < M; ++row) {
        const T* x_row = x + row * C;
        T* out_row = out + row * C;
        const float mean =
            lane_sum(C, [=](int64_t c) { return to_float(x_row[c]); }) / static_cast<float>(C);
        const float variance = lane_sum(C,
                                        [=](int64_t c) {
                                            const float centred = to_float(x_row[c]) - mean;
                                            return centred * centred;
                                        }) /
                               static_cast<float>(C);
        const float rstd = 1.0f / std::sqrt(variance + epsilon);
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) {
            store(out_row[c], (to_float(x_row[c]) - mean) * rstd * to_float(w[c]) + to_float(b[c]));
        }
        if (stats) {
            stats[2 * row] = mean;
            stats[2 * row + 1] = rstd;
        }
    }
}

/// Sums over the rows of one block, [C] each.
struct ColumnSums {
    float *dw, *db, *dbias;
};

template <class T, bool overwrite>
void backward_rows(const LayerNormBackward& args, int64_t first, int64_t last,
                   const ColumnSums& sums) {
    const int64_t C = args.x.cols();
    const T* w = args.w.as<T>();
    const float* stats = args.stats.as<float>();
    float *dw = sums.dw, *db = sums.db, *dbias = sums.dbias;
    std::fill_n(dw, C, 0.0f);
    std::fill_n(db, C, 0.0f);
    std::fill_n(dbias, C, 0.0f);

    for (int64_t row = first; row < last; ++row) {
        const T *x = args.x.as<T>() + row * C, *dy = args.dy.as<T>() + row * C;
        T* dres = args.dres.as<T>() + row * C;
        const float mean = stats[2 * row], rstd = stats[2 * row + 1];
        const float scale = 1.0f / static_cast<float>(C);
        const float mean_g =
            scale * lane_sum(C, [=](int64_t c) { return to_float(dy[c]) * to_float(w[c]); });
        const float mean_gx =
            scale * lane_sum(C, [=](int64_t c) {
                return to_float(dy[c]) * to_float(w[c]) * ((to_float(x[c]) - mean) * rstd);
            });
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) {
            const float normal = (to_float(x[c]) - mean) * rstd, dy_c = to_float(dy[c]);
            float gradient = rstd * (dy_c * to_float(w[c]) - mean_g - normal * mean_gx);
            if (!overwrite) gradient += to_float(dres[c]);
            store(dres[c], gradient);
            dw[c] += dy_c * normal;
            db[c] += dy_c;
            dbias[c] += to_float(dres[c]);  // as stored
        }
    }
}

/// sink (+)= Σ_block partials[block], columns [first, last).
void reduce(const GradientSink& sink, const float* partials, int64_t blocks, int64_t stride,
            int64_t first, int64_t last) {
    if (!sink) return;
    assert(sink.dtype == DType::fp32);
    float* out = static_cast<float*>(sink.data);
    for (int64_t c = first; c < last; ++c) out[c] = (sink.accumulate ? out[c] : 0.0f) + partials[c];
    for (int64_t block = 1; block < blocks; ++block) {
        const float* sums = partials + block * stride;
#pragma omp simd
        for (int64_t c = first; c < last; ++c) out[c] += sums[c];
    }
}

}  // namespace

void layernorm_forward(Stream& stream, const LayerNormForward& args) {
    const Profiled profiled(stream, cost_of(args));
    TRAIN_GPT_ON_CUDA(stream.device, layernorm_forward(stream, args));
    assert(args.x.dtype == args.out.dtype && args.out.data != args.x.data);
    with_float_type(args.x.dtype, [&](auto type) { forward<decltype(type)>(args); });
}

void layernorm_backward(Stream& stream, const LayerNormBackward& args) {
    const Profiled profiled(stream, cost_of(args));
    TRAIN_GPT_ON_CUDA(stream.device, layernorm_backward(stream, args));
    const int64_t M = args.x.rows(), C = args.x.cols();
    const int64_t blocks = block_count(M), block_rows = rows_per_block(M), stride = 3 * C;
    constexpr int64_t columns = 64;  // per item of the reduction: whole cache lines
    float* partials = stream.scratch_for<float>(layernorm_scratch_bytes(stream, M, C));

    with_float_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel
        {
#pragma omp for schedule(static)
            for (int64_t block = 0; block < blocks; ++block) {
                float* start = partials + block * stride;
                const ColumnSums sums{start, start + C, start + 2 * C};
                const int64_t first = block * block_rows, last = std::min(M, first + block_rows);
                if (args.overwrite_dres) {
                    backward_rows<T, true>(args, first, last, sums);
                } else {
                    backward_rows<T, false>(args, first, last, sums);
                }
            }
#pragma omp for schedule(static)
            for (int64_t first = 0; first < C; first += columns) {
                const int64_t last = std::min(C, first + columns);
                reduce(args.dw, partials, blocks, stride, first, last);
                reduce(args.db, partials + C, blocks, stride, first, last);
                reduce(args.dbias, partials + 2 * C, blocks, stride, first, last);
            }
        }
    });
}

size_t layernorm_scratch_bytes(const Stream& stream, int64_t M, int64_t C) {
    TRAIN_GPT_ON_CUDA(stream.device, layernorm_scratch_bytes(M, C));
    return static_cast<size_t>(block_count(M) * 3 * C) * sizeof(float);
}

Cost cost_of(const LayerNormForward& a) {
    return {"layernorm_forward",
            bytes_of(a.x) + bytes_of(a.w) + bytes_of(a.b) + bytes_of(a.out) + bytes_of(a.stats), 0};
}

Cost cost_of(const LayerNormBackward& a) {
    const int64_t C = a.x.cols();
    return {"layernorm_backward",
            bytes_of(a.dy) + bytes_of(a.x) + bytes_of(a.stats) + bytes_of(a.w) +
                bytes_of(a.dres) * (a.overwrite_dres ? 1 : 2) + bytes_of(a.dw, C) +
                bytes_of(a.db, C) + bytes_of(a.dbias, C),
            0};
}

}  // namespace train_gpt
