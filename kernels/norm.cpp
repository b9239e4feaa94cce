#include "kernels/norm.h"

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
void forward(const NormForward& args) {
    const int64_t M = args.x.rows(), C = args.x.cols();
    const bool rms = args.norm == Norm::rms, adds = bool(args.x_out);
    const auto data = [](const Tensor& tensor) { return tensor ? tensor.as<T>() : nullptr; };
    const T *w = data(args.w), *b = data(args.b), *bias = data(args.bias);
    const float epsilon = args.epsilon;

#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < M; ++row) {
        const T* x = data(args.x) + row * C;
        T* out = data(args.out) + row * C;
        if (adds) {
            const T* residual = data(args.residual) + row * C;
            T* x_out = data(args.x_out) + row * C;
#pragma omp simd
            for (int64_t c = 0; c < C; ++c)
                store(x_out[c],
                      to_float(x[c]) + to_float(residual[c]) + (bias ? to_float(bias[c]) : 0.0f));
            x = x_out;
        }
        const float n = static_cast<float>(C);
        const float mean = rms ? 0.0f : lane_sum(C, [=](int64_t c) { return to_float(x[c]); }) / n;
        const float variance = lane_sum(C,
                                        [=](int64_t c) {
                                            const float centred = to_float(x[c]) - mean;
                                            return centred * centred;
                                        }) /
                               n;
        const float rstd = 1.0f / std::sqrt(variance + epsilon);
        if (b) {
#pragma omp simd
            for (int64_t c = 0; c < C; ++c)
                store(out[c], (to_float(x[c]) - mean) * rstd * to_float(w[c]) + to_float(b[c]));
        } else {
#pragma omp simd
            for (int64_t c = 0; c < C; ++c)
                store(out[c], (to_float(x[c]) - mean) * rstd * to_float(w[c]));
        }
        if (args.stats) {
            float* stats = args.stats.as<float>() + 2 * row;
            stats[0] = mean;
            stats[1] = rstd;
        }
    }
}

/// Sums over the rows of one block, [C] each.
struct ColumnSums {
    float *dw, *db, *dbias;
};

template <class T, bool overwrite>
void backward_rows(const NormBackward& args, int64_t first, int64_t last, const ColumnSums& sums) {
    const int64_t C = args.x.cols();
    const T* w = args.w.as<T>();
    const float* stats = args.stats.as<float>();
    const bool rms = args.norm == Norm::rms;
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
            rms ? 0.0f
                : scale * lane_sum(C, [=](int64_t c) { return to_float(dy[c]) * to_float(w[c]); });
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

void norm_forward(Stream& stream, const NormForward& args) {
    const Profiled profiled(stream, cost_of(args));
    TRAIN_GPT_ON_CUDA(stream.device, norm_forward(stream, args));
    assert(args.x.dtype == args.out.dtype && args.out.data != args.x.data);
    assert(bool(args.x_out) == bool(args.residual) && args.out.data != args.x_out.data);
    with_float_type(args.x.dtype, [&](auto type) { forward<decltype(type)>(args); });
}

void norm_backward(Stream& stream, const NormBackward& args) {
    const Profiled profiled(stream, cost_of(args));
    TRAIN_GPT_ON_CUDA(stream.device, norm_backward(stream, args));
    const int64_t M = args.x.rows(), C = args.x.cols();
    const int64_t blocks = block_count(M), block_rows = rows_per_block(M), stride = 3 * C;
    constexpr int64_t columns = 64;  // per item of the reduction: whole cache lines
    float* partials = stream.scratch_for<float>(norm_scratch_bytes(stream, M, C));

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

size_t norm_scratch_bytes(const Stream& stream, int64_t M, int64_t C) {
    TRAIN_GPT_ON_CUDA(stream.device, norm_scratch_bytes(M, C));
    return static_cast<size_t>(block_count(M) * 3 * C) * sizeof(float);
}

Cost cost_of(const NormForward& a) {
    return {a.norm == Norm::rms ? "rmsnorm_forward" : "layernorm_forward",
            bytes_of(a.x) + bytes_of(a.residual) + bytes_of(a.bias) + bytes_of(a.x_out) +
                bytes_of(a.w) + bytes_of(a.b) + bytes_of(a.out) + bytes_of(a.stats),
            0};
}

Cost cost_of(const NormBackward& a) {
    const int64_t C = a.x.cols();
    return {a.norm == Norm::rms ? "rmsnorm_backward" : "layernorm_backward",
            bytes_of(a.dy) + bytes_of(a.x) + bytes_of(a.stats) + bytes_of(a.w) +
                bytes_of(a.dres) * (a.overwrite_dres ? 1 : 2) + bytes_of(a.dw, C) +
                bytes_of(a.db, C) + bytes_of(a.dbias, C),
            0};
}

}  // namespace train_gpt
