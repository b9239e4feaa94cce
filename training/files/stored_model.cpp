#include "training/files/stored_model.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <type_traits>

#include "base/error.h"
#include "base/half.h"

namespace train_gpt {

namespace {

template <class T>
bool is_finite(T value) {
    return std::isfinite(static_cast<float>(value));
}

/// Converts values to T, in `bytes`. Throws Error when one is not finite before or after rounding.
template <class T>
void round_to(std::span<const float> values, StoredType type, const std::string& name,
              std::vector<std::byte>& bytes) {
    bytes.resize(values.size() * sizeof(T));
    T* out = reinterpret_cast<T*>(bytes.data());
    std::transform(values.begin(), values.end(), out, [](float v) { return T(v); });
    if (std::all_of(out, out + values.size(), is_finite<T>)) return;
    const auto bad =
        std::find_if_not(values.begin(), values.end(), [](float v) { return is_finite(T(v)); });
    if (!std::isfinite(*bad))
        throw Error("the weights hold numbers that are not finite (first in ", name,
                    "); such a model is of no use");
    throw Error("the tensor ", name, " holds ", *bad, ", which is too large for ", name_of(type),
                "; write the model in ", type == StoredType::fp16 ? "bf16 or " : "", "fp32");
}

}  // namespace

StoredType stored_type_of(DType dtype) {
    switch (dtype) {
        case DType::fp32:
            return StoredType::fp32;
        case DType::bf16:
            return StoredType::bf16;
        case DType::int32:
        case DType::int64:
        case DType::fp64:
            break;
    }
    throw Error("files do not store weights or optimizer state in ", name_of(dtype));
}

void load_weights(const StoredModel& model, ParameterStore& parameters) {
    std::vector<float> values;
    for (int i = 0; i < static_cast<int>(parameters.parameters().size()); ++i) {
        const Parameter& p = parameters.parameters()[static_cast<size_t>(i)];
        values.resize(static_cast<size_t>(p.numel()));
        model.read(p, 0, values);
        parameters.state.set(i, values);
    }
    parameters.state.clear_padding();
}

void write_parameter(const StoredModel& model, const Parameter& p, Range part, StoredType type,
                     bool transposed,
                     const std::function<void(std::span<const std::byte>)>& write) {
    assert(!transposed || p.transposed());
    constexpr int64_t piece_elements = 1 << 18;
    const bool whole = p.transposed();
    std::vector<float> all(whole ? static_cast<size_t>(p.numel()) : 0), values;
    if (whole) model.read(p, 0, all);
    const int64_t begin = part.first * p.cols();  // of the part
    const int64_t rows = transposed ? p.cols() : part.n, cols = transposed ? part.n : p.cols();
    const int64_t rows_at_once = std::max<int64_t>(1, piece_elements / cols);
    std::vector<std::byte> bytes;
    for (int64_t first = 0; first < rows; first += rows_at_once) {
        const int64_t n = std::min(rows_at_once, rows - first);
        std::span<const float> piece;
        if (whole && !transposed) {
            piece = std::span(all).subspan(static_cast<size_t>(begin + first * cols),
                                           static_cast<size_t>(n * cols));
        } else {
            values.resize(static_cast<size_t>(n * cols));
            if (transposed)
                transpose(all.data() + begin + first, rows, values.data(), cols, n);
            else
                model.read(p, begin + first * cols, values);
            piece = values;
        }
        if (type == StoredType::fp32)
            round_to<float>(piece, type, p.name, bytes);
        else if (type == StoredType::bf16)
            round_to<bf16>(piece, type, p.name, bytes);
        else
            round_to<fp16>(piece, type, p.name, bytes);
        write(bytes);
    }
}

void transpose(const float* in, int64_t in_stride, float* out, int64_t rows, int64_t cols) {
    constexpr int64_t tile = 32;
#pragma omp parallel for schedule(static)
    for (int64_t r0 = 0; r0 < rows; r0 += tile)
        for (int64_t c0 = 0; c0 < cols; c0 += tile)
            for (int64_t r = r0; r < std::min(rows, r0 + tile); ++r)
                for (int64_t c = c0; c < std::min(cols, c0 + tile); ++c)
                    out[c * rows + r] = in[r * in_stride + c];
}

}  // namespace train_gpt
