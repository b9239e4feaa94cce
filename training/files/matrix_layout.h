// How files hold the elements of a matrix in another order than memory: transposed, or with the two
// halves of its rows in turns (StoredTensor in parallel/state/parameter.h).
#pragma once
#include <cstdint>

#include "parallel/range.h"

namespace train_gpt {

/// A matrix of rows × cols in memory. Row r of memory is row r' of files:
///   r' = r,                                          or if interleaved
///   r' = 2·r for r < rows / 2, else 2·(r − rows / 2) + 1
/// and if transposed, files hold these rows as columns.
struct MatrixLayout {
    int64_t rows = 0, cols = 0;
    bool transposed = false, interleaved = false;

    int64_t file_rows() const { return transposed ? cols : rows; }
    int64_t file_cols() const { return transposed ? rows : cols; }
    int64_t file_row(int64_t r) const {
        if (!interleaved) return r;
        return r < rows / 2 ? 2 * r : 2 * (r - rows / 2) + 1;
    }
};

/// Sets `memory` [rows, cols] to the matrix that files hold as `file` [file_rows, file_cols].
void matrix_from_file(const MatrixLayout& layout, const float* file, float* memory);

/// Sets out [part.n, file_cols] to some of the rows of files of the matrix `memory` [rows, cols].
void rows_for_file(const MatrixLayout& layout, const float* memory, Range part, float* out);

}  // namespace train_gpt
