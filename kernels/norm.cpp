#include "kernels/norm.h"

#include <algorithm>
#include <cassert>
#include <cmath>

#include "device/profile.h"
#include "kernels/neighbours.h"

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
            if (bias) {
                for_positions<T>(
                    C, [=](auto at) { at.store(x_out, at(x) + at(residual) + at(bias)); });
            } else {
                for_positions<T>(C, [=](auto at) { at.store(x_out, at(x) + at(residual)); });
            }
            x = x_out;
        }
        const float n = static_cast<float>(C);
        const float mean = rms ? 0.0f : position_sum<T>(C, [=](auto at) { return at(x); }) / n;
        const float variance = position_sum<T>(C,
                                               [=](auto at) {
                                                   const auto centred = at(x) - mean;
                                                   return centred * centred;
                                               }) /
                               n;
        const float rstd = 1.0f / std::sqrt(variance + epsilon);
        const T* next = data(args.x) + (row + 1) * C;
        if (b) {
            for_positions_before<T>(
                C, [=](auto at) { at.store(out, (at(x) - mean) * rstd * at(w) + at(b)); }, next);
        } else {
            for_positions_before<T>(
                C, [=](auto at) { at.store(out, (at(x) - mean) * rstd * at(w)); }, next);
        }
        if (args.stats) {
            float* stats = args.stats.as<float>() + 2 * row;
            stats[0] = mean;
            stats[1] = rstd;
        }
    }
}

/// Calls f(std::true_type{}) or f(std::false_type{}).
template <class F>
void with_bool(bool value, F&& f) {
    value ? f(std::true_type{}) : f(std::false_type{});
}

/// Sums over the rows of one block, [C] each; db and dbias may be null.
struct ColumnSums {
    float *dw, *db, *dbias;
};

/// What the backward pass of a row needs.
template <class T>
struct BackwardRow {
    const T *x, *dy;
    T* dres;
    float mean, rstd, mean_g, mean_gx;

    BackwardRow(const NormBackward& args, int64_t row) {
        const int64_t C = args.x.cols();
        const T* w = args.w.as<T>();
        const T *x_ = x = args.x.as<T>() + row * C, *dy_ = dy = args.dy.as<T>() + row * C;
        dres = args.dres.as<T>() + row * C;
        const float *stats = args.stats.as<float>() + 2 * row, scale = 1.0f / static_cast<float>(C);
        const float mean_ = mean = stats[0], rstd_ = rstd = stats[1];
        mean_g = args.norm == Norm::rms
                     ? 0.0f
                     : scale * position_sum<T>(C, [=](auto at) { return at(dy_) * at(w); });
        mean_gx = scale * position_sum<T>(C, [=](auto at) {
                      return at(dy_) * at(w) * ((at(x_) - mean_) * rstd_);
                  });
    }
};

template <class T, bool overwrite, bool has_db, bool has_dbias>
struct Backward {
    const NormBackward& args;
    const ColumnSums sums;

    /// Of `count` rows at a time, so that the sums are read and written once for all of them.
    template <int count, size_t... r>
    void rows(int64_t first, std::index_sequence<r...>) const {
        const int64_t C = args.x.cols();
        const T* w = args.w.as<T>();
        float *dw = sums.dw, *db = sums.db, *dbias = sums.dbias;
        const BackwardRow<T> rows[count] = {BackwardRow<T>(args, first + int64_t{r})...};
        const auto compute = [=](auto at) {
            const auto w_c = at(w);
            auto dw_c = at(dw);
            auto db_c = has_db ? at(db) : decltype(w_c){0};
            auto dbias_c = has_dbias ? at(dbias) : decltype(w_c){0};
            const auto add_row = [&](const BackwardRow<T>& row) {
                const auto normal = (at(row.x) - row.mean) * row.rstd, dy_c = at(row.dy);
                auto gradient = row.rstd * (dy_c * w_c - row.mean_g - normal * row.mean_gx);
                if (!overwrite) gradient = gradient + at(row.dres);
                const auto stored = at.store(row.dres, gradient);
                dw_c = dw_c + dy_c * normal;
                if (has_db) db_c = db_c + dy_c;
                if (has_dbias) dbias_c = dbias_c + stored;
            };
            (add_row(rows[r]), ...);
            at.store(dw, dw_c);
            if (has_db) at.store(db, db_c);
            if (has_dbias) at.store(dbias, dbias_c);
        };
        for_positions_before<T>(C, compute, rows[r].x + count * C..., rows[r].dy + count * C...,
                                rows[r].dres + count * C...);
    }

    void block(int64_t first, int64_t last) const {
        const int64_t C = args.x.cols();
        std::fill_n(sums.dw, C, 0.0f);
        if (has_db) std::fill_n(sums.db, C, 0.0f);
        if (has_dbias) std::fill_n(sums.dbias, C, 0.0f);
        constexpr int together = 2;
        for (; first + together <= last; first += together)
            rows<together>(first, std::make_index_sequence<together>());
        for (; first < last; ++first) rows<1>(first, std::make_index_sequence<1>());
    }
};

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
    if (args.rounded) TRAIN_GPT_ON_CUDA(stream.device, norm_forward_rounded(stream, args));
    assert(!args.rounded);
    TRAIN_GPT_ON_CUDA(stream.device, norm_forward(stream, args));
    assert(args.x.dtype == args.out.dtype && args.out.data != args.x.data);
    assert(bool(args.x_out) == bool(args.residual) && args.out.data != args.x_out.data);
    with_float_type(args.x.dtype, [&](auto type) { forward<decltype(type)>(args); });
}

bool norm_rounds(const Stream& stream, [[maybe_unused]] DType dtype, [[maybe_unused]] int64_t M,
                 [[maybe_unused]] int64_t C) {
    TRAIN_GPT_ON_CUDA(stream.device, norm_rounds(stream, dtype, M, C));
    return false;
}

void norm_backward(Stream& stream, const NormBackward& args) {
    const Profiled profiled(stream, cost_of(args));
    TRAIN_GPT_ON_CUDA(stream.device, norm_backward(stream, args));
    const int64_t M = args.x.rows(), C = args.x.cols();
    const int64_t blocks = block_count(M), block_rows = rows_per_block(M), stride = 3 * C;
    constexpr int64_t columns = 64;  // per item of the reduction: whole cache lines
    float* partials = stream.scratch_for<float>(norm_scratch_bytes(stream, M, C));

    const auto backward = [&]<class T, bool overwrite, bool has_db, bool has_dbias>() {
#pragma omp parallel
        {
#pragma omp for schedule(static)
            for (int64_t block = 0; block < blocks; ++block) {
                float* start = partials + block * stride;
                const int64_t first = block * block_rows, last = std::min(M, first + block_rows);
                Backward<T, overwrite, has_db, has_dbias>{args, {start, start + C, start + 2 * C}}
                    .block(first, last);
            }
#pragma omp for schedule(static)
            for (int64_t first = 0; first < C; first += columns) {
                const int64_t last = std::min(C, first + columns);
                reduce(args.dw, partials, blocks, stride, first, last);
                reduce(args.db, partials + C, blocks, stride, first, last);
                reduce(args.dbias, partials + 2 * C, blocks, stride, first, last);
            }
        }
    };
    with_float_type(args.x.dtype, [&]<class T>(T) {
        with_bool(args.overwrite_dres, [&](auto overwrite) {
            with_bool(bool(args.db), [&](auto has_db) {
                with_bool(bool(args.dbias), [&](auto has_dbias) {
                    backward.template operator()<T, overwrite, has_db, has_dbias>();
                });
            });
        });
    });
}

size_t norm_scratch_bytes(const Stream& stream, int64_t M, int64_t C) {
    TRAIN_GPT_ON_CUDA(stream.device, norm_scratch_bytes(M, C));
    return static_cast<size_t>(block_count(M) * 3 * C) * sizeof(float);
}

Cost cost_of(const NormForward& a) {
    const double result =
        a.rounded ? bytes_of(a.rounded.codes) + bytes_of(a.rounded.transposed) : bytes_of(a.out);
    return {a.norm == Norm::rms ? "rmsnorm_forward" : "layernorm_forward",
            bytes_of(a.x) + bytes_of(a.residual) + bytes_of(a.bias) + bytes_of(a.x_out) +
                bytes_of(a.w) + bytes_of(a.b) + result + bytes_of(a.stats),
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
