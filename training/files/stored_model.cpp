#include "training/files/stored_model.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <type_traits>

#include "base/error.h"
#include "base/half.h"
#include "training/files/matrix_layout.h"

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
        case DType::uint8:
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

namespace {

/// Rows that a StoredModel may be asked for at once: of a parameter that is reordered() its
/// matrices, else as many as make a small piece.
std::vector<Range> readable_pieces(const Parameter& p, Range rows) {
    constexpr int64_t piece_elements = 1 << 18;
    std::vector<Range> pieces;
    const auto cut = [&](Range whole, int64_t at_once) {
        for (int64_t first = whole.first; first < whole.end(); first += at_once)
            pieces.push_back({first, std::min(at_once, whole.end() - first)});
    };
    if (!p.reordered()) {
        cut(rows, std::max<int64_t>(1, piece_elements / p.cols()));
        return pieces;
    }
    int64_t row = 0;
    for (const StoredTensor& stored : p.stored) {
        const Range held = intersection({row, stored.rows}, rows);
        assert(held.n == 0 || held.n == stored.rows);
        if (held.n > 0) cut(held, stored.matrix_rows());
        row += stored.rows;
    }
    return pieces;
}

}  // namespace

void write_parameter(const StoredModel& model, const Parameter& p, Range rows, StoredType type,
                     const StoredTensor& layout,
                     const std::function<void(std::span<const std::byte>)>& write) {
    assert(!layout.reordered() || p.reordered());
    constexpr int64_t piece_elements = 1 << 18;
    std::vector<float> values, turned;
    std::vector<std::byte> bytes;
    for (const Range& piece : readable_pieces(p, rows)) {
        values.resize(static_cast<size_t>(piece.n * p.cols()));
        model.read(p, piece.first * p.cols(), values);
        const MatrixLayout matrix{piece.n, p.cols(), layout.transposed, layout.interleaved};
        const int64_t rows_at_once = std::max<int64_t>(1, piece_elements / matrix.file_cols());
        for (int64_t first = 0; first < matrix.file_rows(); first += rows_at_once) {
            const int64_t n = std::min(rows_at_once, matrix.file_rows() - first);
            std::span<const float> part;
            if (layout.reordered()) {
                turned.resize(static_cast<size_t>(n * matrix.file_cols()));
                rows_for_file(matrix, values.data(), {first, n}, turned.data());
                part = turned;
            } else {
                part = std::span(values).subspan(static_cast<size_t>(first * p.cols()),
                                                 static_cast<size_t>(n * p.cols()));
            }
            if (type == StoredType::fp32)
                round_to<float>(part, type, p.name, bytes);
            else if (type == StoredType::bf16)
                round_to<bf16>(part, type, p.name, bytes);
            else
                round_to<fp16>(part, type, p.name, bytes);
            write(bytes);
        }
    }
}

}  // namespace train_gpt
