#include "training/files/matrix_layout.h"

#include <algorithm>

namespace train_gpt {

namespace {

constexpr int64_t tile = 32;

}  // namespace

void matrix_from_file(const MatrixLayout& layout, const float* file, float* memory) {
    const int64_t rows = layout.rows, cols = layout.cols;
#pragma omp parallel for schedule(static)
    for (int64_t r0 = 0; r0 < rows; r0 += tile)
        for (int64_t c0 = 0; c0 < cols; c0 += tile)
            for (int64_t r = r0; r < std::min(rows, r0 + tile); ++r) {
                const int64_t at = layout.file_row(r);
                for (int64_t c = c0; c < std::min(cols, c0 + tile); ++c)
                    memory[r * cols + c] =
                        layout.transposed ? file[c * rows + at] : file[at * cols + c];
            }
}

void rows_for_file(const MatrixLayout& layout, const float* memory, Range part, float* out) {
    const int64_t rows = layout.rows, cols = layout.cols;
    if (!layout.transposed) {
#pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < rows; ++r)
            if (const int64_t at = layout.file_row(r) - part.first; at >= 0 && at < part.n)
                std::copy_n(memory + r * cols, cols, out + at * cols);
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t c0 = 0; c0 < part.n; c0 += tile)
        for (int64_t r0 = 0; r0 < rows; r0 += tile)
            for (int64_t r = r0; r < std::min(rows, r0 + tile); ++r) {
                const int64_t at = layout.file_row(r);
                for (int64_t c = c0; c < std::min(part.n, c0 + tile); ++c)
                    out[c * rows + at] = memory[r * cols + part.first + c];
            }
}

}  // namespace train_gpt
