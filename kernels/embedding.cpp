#include "kernels/embedding.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <omp.h>

#include "device/profile.h"
#include "kernels/exact_math.h"
#include "kernels/exact_sums.h"
#include "kernels/lanes.h"

namespace train_gpt {

namespace {

template <class T>
void forward(const EmbeddingForward& args) {
    const int64_t rows = args.out.rows(), C = args.out.cols(),
                  T_ = args.out.shape[args.out.rank - 2];
    const T* w = args.w.as<T>();
    const T* positions = args.positions ? args.positions.as<T>() : nullptr;
    T* out = args.out.as<T>();

#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t start = args.doc_start ? args.doc_start[row] : 0;
        const int64_t position = args.first_position + row % T_ - start;
        assert(position >= 0 && (!positions || position < args.positions.rows()));
        const int64_t token = args.tokens[row] - args.first_token;
        const T* of_token = token >= 0 && token < args.w.rows() ? w + token * C : nullptr;
        const T* of_position = positions ? positions + position * C : nullptr;
        T* out_row = out + row * C;
        if (of_token && of_position) {
#pragma omp simd
            for (int64_t c = 0; c < C; ++c)
                store(out_row[c], to_float(of_token[c]) + to_float(of_position[c]));
        } else if (const T* only = of_token ? of_token : of_position) {
            std::copy_n(only, C, out_row);
        } else {
            std::fill_n(out_row, C, T{});
        }
    }
}

template <class T>
void add_row(float* sum, const T* row, int64_t columns) {
#pragma omp simd
    for (int64_t c = 0; c < columns; ++c) sum[c] += to_float(row[c]);
}

/// One part of the work: a slice of the columns, and the rows of dw and dpositions with index %
/// parts == part. It visits the tokens in order, so each element is summed in the same order for
/// any number of parts.
template <class T>
void backward_part(const EmbeddingBackward& args, int64_t first_column, int64_t columns,
                   int64_t part, int64_t parts) {
    const int64_t rows = args.dout.rows(), C = args.dout.cols(),
                  T_ = args.dout.shape[args.dout.rank - 2];
    const T* dout = args.dout.as<T>() + first_column;
    float* dw = args.dw ? static_cast<float*>(args.dw.data) + first_column : nullptr;
    float* dpositions =
        args.dpositions ? static_cast<float*>(args.dpositions.data) + first_column : nullptr;

    const auto clear = [&](float* sink, int64_t sink_rows) {
        for (int64_t i = part; i < sink_rows; i += parts) std::fill_n(sink + i * C, columns, 0.0f);
    };
    if (dw && !args.dw.accumulate) clear(dw, args.vocab_rows);
    if (dpositions && !args.dpositions.accumulate) clear(dpositions, args.n_ctx);
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t token = args.tokens[row] - args.first_token;
        const int64_t position = row % T_ - (args.doc_start ? args.doc_start[row] : 0);
        assert(position >= 0 && (!dpositions || position < args.n_ctx));
        if (dw && token >= 0 && token < args.vocab_rows && token % parts == part)
            add_row(dw + token * C, dout + row * C, columns);
        if (dpositions && position % parts == part)
            add_row(dpositions + position * C, dout + row * C, columns);
    }
}

/// The rows of dout of each token in the sink's range: ascending tokens, and rows in order.
std::vector<std::pair<int64_t, int64_t>> sorted_rows(const EmbeddingBackward& args) {
    std::vector<std::pair<int64_t, int64_t>> sorted;
    for (int64_t row = 0; row < args.dout.rows(); ++row)
        if (const int64_t token = args.tokens[row] - args.first_token;
            token >= 0 && token < args.vocab_rows)
            sorted.emplace_back(token, row);
    std::ranges::sort(sorted);
    return sorted;
}

/// Rounds sums[n], and adds them to the row of the sink. Returns the largest of their bits.
uint32_t add_rounded(int32_t* sink, const float* sums, int64_t n, float inverse, bool looks_only) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t c = 0; c < n; ++c) largest = std::max(largest, magnitude_bits(sums[c]));
    if (looks_only) return largest;
    auto* const to = reinterpret_cast<uint32_t*>(sink);
#pragma omp simd
    for (int64_t c = 0; c < n; ++c)
        to[c] += static_cast<uint32_t>(rounded_to_grid(sums[c], inverse));
    return largest;
}

/// dw in integers. A thread takes one token at a time, with all of its rows.
template <class T>
void exact_backward(const EmbeddingBackward& args) {
    const ExactRows& exact = *args.dw.exact;
    const int64_t C = args.dout.cols();
    auto* const dw = static_cast<int32_t*>(args.dw.data);
    const float inverse = power_of_two(-*exact.exponent);
    if (!args.dw.accumulate && !exact.looks_only) {
#pragma omp parallel for schedule(static)
        for (int64_t row = 0; row < args.vocab_rows; ++row) std::fill_n(dw + row * C, C, 0);
    }
    const auto sorted = sorted_rows(args);
    std::vector<size_t> first_of_run;
    for (size_t i = 0; i < sorted.size(); ++i)
        if (i == 0 || sorted[i].first != sorted[i - 1].first) first_of_run.push_back(i);
    const size_t runs = first_of_run.size();
    first_of_run.push_back(sorted.size());
    uint32_t largest = *exact.largest;
#pragma omp parallel reduction(max : largest)
    {
        std::vector<float> sums(static_cast<size_t>(C));
#pragma omp for schedule(dynamic, 8)
        for (size_t run = 0; run < runs; ++run) {
            std::ranges::fill(sums, 0.0f);
            const int64_t token = sorted[first_of_run[run]].first;
            for (size_t i = first_of_run[run]; i < first_of_run[run + 1]; ++i)
                add_row(sums.data(), args.dout.as<T>() + sorted[i].second * C, C);
            largest = std::max(
                largest, add_rounded(dw + token * C, sums.data(), C, inverse, exact.looks_only));
        }
    }
    *exact.largest = largest;
}

}  // namespace

void embedding_forward(Stream& stream, const EmbeddingForward& args) {
    const Profiled profiled(stream, cost_of(args));
    TRAIN_GPT_ON_CUDA(stream.device, embedding_forward(stream, args));
    with_float_type(args.out.dtype, [&](auto type) { forward<decltype(type)>(args); });
}

void embedding_backward(Stream& stream, const EmbeddingBackward& all) {
    const Profiled profiled(stream, cost_of(all));
    TRAIN_GPT_ON_CUDA(stream.device, embedding_backward(stream, all));
    assert(all.dpositions.dtype == DType::fp32 && !all.dpositions.exact);
    assert(all.dw.dtype == (all.dw.exact ? DType::int32 : DType::fp32));
    assert(!all.dw || all.vocab_rows > 0);
    EmbeddingBackward args = all;
    if (all.dw.exact) {
        with_float_type(all.dout.dtype, [&](auto type) { exact_backward<decltype(type)>(all); });
        args.dw = {};
        if (!args.dpositions) return;
    }
    // Slicing only the columns wastes no visits: a thread adds every row that it visits. The rows
    // are divided as well only if there are more threads than slices of at least min_slice columns,
    // in whole cache lines.
    constexpr int64_t min_slice = 64, line = 16;
    const int64_t C = args.dout.cols(), threads = omp_get_max_threads();
    const int64_t wanted_slices = std::clamp<int64_t>(C / min_slice, 1, threads);
    const int64_t slice = ((C + wanted_slices - 1) / wanted_slices + line - 1) / line * line;
    const int64_t slices = (C + slice - 1) / slice;
    const int64_t parts = (threads + slices - 1) / slices;

    with_float_type(args.dout.dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for schedule(static)
        for (int64_t item = 0; item < slices * parts; ++item) {
            const int64_t first_column = item % slices * slice;
            backward_part<T>(args, first_column, std::min(slice, C - first_column), item / slices,
                             parts);
        }
    });
}

size_t embedding_scratch_bytes(const Stream& stream, [[maybe_unused]] int64_t rows,
                               [[maybe_unused]] int64_t vocab_rows) {
    TRAIN_GPT_ON_CUDA(stream.device, embedding_scratch_bytes(stream.device, rows));
    return 0;
}

Cost cost_of(const EmbeddingForward& a) { return {"embedding_forward", 2 * bytes_of(a.out), 0}; }

Cost cost_of(const EmbeddingBackward& a) {
    const int64_t C = a.dout.cols();
    const double fp32 = static_cast<double>(a.dout.numel()) * sizeof(float);
    // Rows of tokens that occur are read and written; all are written if the sink is overwritten.
    const double dw = a.dw.accumulate ? 2 * fp32 : bytes_of(a.dw, a.vocab_rows * C);
    return {"embedding_backward", bytes_of(a.dout) + dw + bytes_of(a.dpositions, a.n_ctx * C), 0};
}

}  // namespace train_gpt
