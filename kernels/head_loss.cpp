#include "kernels/head_loss.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "device/profile.h"
#include "kernels/exp_math.h"
#include "kernels/lanes.h"
#include "kernels/linear/linear.h"
#include "kernels/softcap_math.h"

namespace train_gpt {

namespace {

constexpr int32_t ignored_target = -1;

struct RowStats {
    float max, sum, target;
};

/// Row statistics over the capped z[0..columns); target is an index into z, or out of range.
template <class T, class Cap>
RowStats row_stats(const T* z, int64_t columns, int64_t target, Cap cap) {
    RowStats stats;
    stats.max = cap(lane_max(columns, [=](int64_t j) { return to_float(z[j]); }));
    const float max = stats.max;
    stats.sum = lane_sum(columns, [=](int64_t j) { return fast_exp(cap(to_float(z[j])) - max); });
    const bool here = target >= 0 && target < columns;
    stats.target = here ? cap(to_float(z[target])) : -std::numeric_limits<float>::infinity();
    return stats;
}

/// The factor of the softmax in dz.
float softmax_factor(float max, float sum, float z_loss) {
    return z_loss == 0 ? 1 : 1 + 2 * z_loss * (std::log(sum) + max);
}

/// A row of logits, of which `columns` are in the vocabulary, and the target's index among them.
template <class T>
struct Row {
    T* z;
    int64_t columns, padded, target;
};

/// The row becomes factor · softmax − one-hot(target), times the cap's slope; its padding zero.
template <class T, class Cap>
void row_backward(const Row<T>& row, float max, float sum, float factor, Cap cap) {
    T* z = row.z;
    const float scale = factor / sum;
    const auto of = [=](int64_t j, float minus) {
        const float capped = cap(to_float(z[j]));
        return (fast_exp(capped - max) * scale - minus) * cap.slope(capped);
    };
    const bool here = row.target >= 0 && row.target < row.columns;
    const float at_target = here ? of(row.target, 1.0f) : 0.0f;
#pragma omp simd
    for (int64_t j = 0; j < row.columns; ++j) store(z[j], of(j, 0.0f));
    if (here) store(z[row.target], at_target);
    std::fill(z + row.columns, z + row.padded, T{});
}

/// Losses of one chunk of rows, which begins at row `first`, and with dx, dz in place of the logits
/// while the row is in cache.
template <class T, class Cap>
void chunk_loss(const HeadLoss& args, int64_t first, Tensor logits, Cap cap) {
    const int64_t rows = logits.rows(), Vp = logits.cols(), V = args.V;
    const int32_t* targets = args.targets + first;
    float* losses = args.losses + first;
    const bool backward = static_cast<bool>(args.dx);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        T* z = logits.as<T>() + row * Vp;
        const int32_t target = targets[row];
        if (target == ignored_target) {
            losses[row] = 0;
            if (backward) std::fill_n(z, Vp, T{});
            continue;
        }
        const RowStats stats = row_stats(z, V, target, cap);
        losses[row] = std::log(stats.sum) + (stats.max - stats.target);
        if (backward)
            row_backward(Row<T>{z, V, Vp, target}, stats.max, stats.sum,
                         softmax_factor(stats.max, stats.sum, args.z_loss), cap);
    }
}

/// The same for a part of the vocabulary; `first` is the chunk's first row.
void chunk_loss_of_part(Stream& stream, const HeadLoss& args, int64_t first, Tensor logits) {
    const Tensor stats = args.stats.row_range(0, logits.rows());
    const int32_t* targets = args.targets + first;
    softmax_stats(stream, {.stats = stats,
                           .logits = logits,
                           .targets = targets,
                           .first_column = args.first_column,
                           .columns = args.V,
                           .softcap = args.softcap});
    args.combine(stream, stats);
    losses_of_stats(stream, args.losses + first, stats, targets);
    if (args.dx)
        softmax_backward(stream, {.logits = logits,
                                  .stats = stats,
                                  .targets = targets,
                                  .first_column = args.first_column,
                                  .columns = args.V,
                                  .z_loss = args.z_loss,
                                  .softcap = args.softcap});
}

}  // namespace

void head_loss(Stream& stream, const HeadLoss& args) {
    const Profiled profiled(stream, cost_of(args));
    TRAIN_GPT_ON_CUDA(stream.device, head_loss(stream, args));
    const int64_t R = args.x.rows(), chunk = args.logits.rows();
    assert(args.w.cols() == args.x.cols() && args.logits.cols() == args.w.rows() &&
           args.V <= args.w.rows());
    assert(args.combine ? args.stats.rows() >= chunk : args.first_column == 0);
    GradientSink dw = args.dw;
    for (int64_t first = 0; first < R; first += chunk) {
        const int64_t rows = std::min(chunk, R - first);
        const Tensor x = args.x.row_range(first, rows), logits = args.logits.row_range(0, rows);
        linear_forward(stream, {.out = logits, .x = x, .w = args.w});
        if (args.combine) {
            chunk_loss_of_part(stream, args, first, logits);
        } else {
            with_float_type(logits.dtype, [&](auto type) {
                with_cap(args.softcap,
                         [&](auto cap) { chunk_loss<decltype(type)>(args, first, logits, cap); });
            });
        }
        if (!args.dx) continue;
        linear_backward_input(stream,
                              {.dx = args.dx.row_range(first, rows), .dy = logits, .w = args.w});
        if (!dw) continue;
        linear_backward_weight(stream, {.dw = dw, .x = x, .dy = logits});
        dw.accumulate = true;
    }
}

void head_logits(Stream& stream, const HeadLogits& args) {
    TRAIN_GPT_ON_CUDA(stream.device, head_logits(stream, args));
    const int64_t R = args.x.rows(), V = args.out.cols(), Vp = args.w.rows();
    const Tensor logits = args.logits.row_range(0, R);
    linear_forward(stream, {.out = logits, .x = args.x, .w = args.w});
    with_float_type(logits.dtype, [&](auto type) {
        using T = decltype(type);
        with_cap(args.softcap, [&](auto cap) {
            for (int64_t row = 0; row < R; ++row) {
                const T* z = logits.as<T>() + row * Vp;
                float* out_row = args.out.as<float>() + row * V;
#pragma omp simd
                for (int64_t j = 0; j < V; ++j) out_row[j] = cap(to_float(z[j]));
            }
        });
    });
}

void softmax_stats(Stream& stream, const SoftmaxStats& args) {
    TRAIN_GPT_ON_CUDA(stream.device, softmax_stats(stream, args));
    const int64_t rows = args.logits.rows(), Vp = args.logits.cols();
    with_float_type(args.logits.dtype, [&](auto type) {
        using T = decltype(type);
        with_cap(args.softcap, [&](auto cap) {
#pragma omp parallel for schedule(static)
            for (int64_t row = 0; row < rows; ++row) {
                const RowStats of_row = row_stats(args.logits.as<T>() + row * Vp, args.columns,
                                                  args.targets[row] - args.first_column, cap);
                float* out = args.stats.as<float>() + 3 * row;
                out[0] = of_row.max;
                out[1] = of_row.sum;
                out[2] = of_row.target;
            }
        });
    });
}

void combine_softmax_stats(Stream& stream, Tensor stats, Tensor of_parts) {
    TRAIN_GPT_ON_CUDA(stream.device, combine_softmax_stats(stream, stats, of_parts));
    const int64_t parts = of_parts.shape[0], rows = stats.rows();
    for (int64_t row = 0; row < rows; ++row) {
        const auto of = [&](int64_t part) {
            return of_parts.as<float>() + 3 * (part * rows + row);
        };
        float max = of(0)[0], sum = 0, target = of(0)[2];
        for (int64_t part = 1; part < parts; ++part) {
            max = std::max(max, of(part)[0]);
            target = std::max(target, of(part)[2]);
        }
        for (int64_t part = 0; part < parts; ++part)
            sum += of(part)[1] * fast_exp(of(part)[0] - max);
        float* out = stats.as<float>() + 3 * row;
        out[0] = max;
        out[1] = sum;
        out[2] = target;
    }
}

void losses_of_stats(Stream& stream, float* losses, Tensor stats, const int32_t* targets) {
    TRAIN_GPT_ON_CUDA(stream.device, losses_of_stats(stream, losses, stats, targets));
    for (int64_t row = 0; row < stats.rows(); ++row) {
        const float* of_row = stats.as<float>() + 3 * row;
        losses[row] =
            targets[row] == ignored_target ? 0 : std::log(of_row[1]) + (of_row[0] - of_row[2]);
    }
}

void softmax_backward(Stream& stream, const SoftmaxBackward& args) {
    TRAIN_GPT_ON_CUDA(stream.device, softmax_backward(stream, args));
    const int64_t rows = args.logits.rows(), Vp = args.logits.cols();
    with_float_type(args.logits.dtype, [&](auto type) {
        using T = decltype(type);
        with_cap(args.softcap, [&](auto cap) {
#pragma omp parallel for schedule(static)
            for (int64_t row = 0; row < rows; ++row) {
                T* z = args.logits.as<T>() + row * Vp;
                const float* of_row = args.stats.as<float>() + 3 * row;
                if (args.targets[row] == ignored_target)
                    std::fill_n(z, Vp, T{});
                else
                    row_backward(Row<T>{z, args.columns, Vp, args.targets[row] - args.first_column},
                                 of_row[0], of_row[1],
                                 softmax_factor(of_row[0], of_row[1], args.z_loss), cap);
            }
        });
    });
}

double rounded_loss(double x) {
    constexpr double units = 1 << 20;
    return std::nearbyint(x * units) / units;
}

void accumulate_loss(Stream& stream, double* total, const float* losses, int64_t n, bool accumulate,
                     bool exact) {
    TRAIN_GPT_ON_CUDA(stream.device, accumulate_loss(stream, total, losses, n, accumulate, exact));
    // A few thousand additions: one thread finishes them before an OpenMP team would have started.
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(losses[i]);
    *total = (accumulate ? *total : 0.0) + (exact ? rounded_loss(sum) : sum);
}

void accumulate_loss_by_source(Stream& stream, const LossBySource& args) {
    TRAIN_GPT_ON_CUDA(stream.device, accumulate_loss_by_source(stream, args));
    if (!args.accumulate) std::fill_n(args.totals, args.sources, 0.0);
    for (int64_t b = 0; b < args.B; ++b) {
        double sum = 0;
        for (int64_t t = 0; t < args.T; ++t)
            sum += static_cast<double>(args.losses[b * args.T + t]);
        args.totals[args.source_of[b]] += args.exact ? rounded_loss(sum) : sum;
    }
}

size_t head_loss_scratch_bytes(const Stream& stream, DType dtype, int64_t chunk, int64_t Vp,
                               int64_t C) {
    TRAIN_GPT_ON_CUDA(stream.device, head_loss_scratch_bytes(dtype, chunk, Vp, C));
    return linear_scratch_bytes(stream, dtype, chunk, Vp, C);
}

Cost cost_of(const HeadLoss& a) {
    const double R = static_cast<double>(a.x.rows());
    const double logits =
        R * static_cast<double>(a.w.rows()) * static_cast<double>(size_of(a.logits.dtype));
    const double forward = product_flops(a.x, a.w);
    if (!a.dx) return {"head_loss", bytes_of(a.x) + bytes_of(a.w) + 2 * logits, forward};
    return {"head_loss",
            2 * bytes_of(a.x) + 2 * bytes_of(a.w) + bytes_of(a.dx) + 5 * logits +
                bytes_of(a.dw, a.w.numel()),
            3 * forward};
}

}  // namespace train_gpt
