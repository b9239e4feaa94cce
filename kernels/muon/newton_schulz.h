// The Newton–Schulz iteration: brings the singular values of a matrix near 1 with matrix products
// alone. (Björck & Bowie 1971; with tuned coefficients: K. Jordan, "Muon", 2024.)
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "device/profile.h"
#include "device/stream.h"

namespace train_gpt {

/// A step of the iteration: X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ. It takes each singular value x
/// to a·x + b·x³ + c·x⁵.
struct NewtonSchulzStep {
    float a = 0, b = 0, c = 0;
};

/// A list of steps that works for singular values in (0, 1], and what the matrix is divided by at
/// the start: safety·‖X‖ + epsilon, with the Frobenius norm, which no singular value exceeds.
struct NewtonSchulzCoefficients {
    std::span<const NewtonSchulzStep> steps;
    float safety = 1, epsilon = 1e-7f;
};

/// newton_schulz.cpp says where each is from.
enum class NewtonSchulzList : uint8_t {
    quintic,
    tuned,
    polar_express,
    polar_express_8,
    cans,
    cubic,
    deepseek,
};
const NewtonSchulzCoefficients& coefficients_of(NewtonSchulzList list);

struct MatrixShape {
    int64_t rows = 0, cols = 0;
};

/// Matrices of one shape, one after the other: [count, rows, cols].
struct MatrixGroup {
    MatrixShape shape;
    int64_t count = 0;
    void* data = nullptr;
};

/// All matrices become their orthogonal factors U·Vᵀ, approximately. Products are summed in fp32,
/// and every intermediate matrix is rounded to dtype. With m = min(rows, cols) and n = max(rows,
/// cols), a step has the products
///
///   A = X·Xᵀ                  m²·n FLOPs: half of it is computed, and mirrored
///   P = A·A                   m³, the same
///   X ← (a·I + b·A + c·P)·X   2·m²·n
///
/// A GPU multiplies several matrices of a shape at a time. On a CPU, each thread takes a matrix, or
/// all together a large one. The bits of a matrix do not depend on the others.
struct NewtonSchulz {
    std::span<const MatrixGroup> groups;
    DType dtype = DType::bf16;
    NewtonSchulzList coefficients = NewtonSchulzList::quintic;
    void* workspace = nullptr;  // newton_schulz_workspace_bytes()
};
void newton_schulz(Stream& stream, const NewtonSchulz& args);

/// For any number of matrices of these shapes. The workspace is aligned as Arena::take() does.
size_t newton_schulz_workspace_bytes(const Device& device, DType dtype,
                                     std::span<const MatrixShape> shapes);
/// The stream's scratch memory that the products need.
size_t newton_schulz_scratch_bytes(const Stream& stream, DType dtype,
                                   std::span<const MatrixShape> shapes);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const NewtonSchulz& args);

/// Half of a symmetric matrix [n, n]: panels of `panel` rows, one after the other. Panel p has rows
/// p·panel …, and of them the columns up to the end of its square on the diagonal.
struct SymmetricPanels {
    int64_t n = 0, panel = 0;

    constexpr int64_t count() const { return (n + panel - 1) / panel; }
    constexpr int64_t first_row(int64_t p) const { return p * panel; }
    constexpr int64_t rows(int64_t p) const { return p + 1 < count() ? panel : n - p * panel; }
    constexpr int64_t cols(int64_t p) const { return first_row(p) + rows(p); }
    constexpr int64_t place(int64_t p) const { return panel * panel * (p * (p + 1) / 2); }
    constexpr int64_t numel() const { return place(count() - 1) + rows(count() - 1) * n; }
};

/// `count` matrices; each array has its matrices one after the other.
struct SymmetricPolynomial {
    void* out = nullptr;                             // [count, n, n]
    const void *first = nullptr, *second = nullptr;  // [count, panels.numel()]; second may be null
    DType dtype = DType::bf16;
    int64_t count = 0;
    SymmetricPanels panels;
    float a = 0, b = 1, c = 0;
};

namespace cuda {  // newton_schulz.cu
/// y = x / (safety·‖x‖ + epsilon) of each of `count` matrices [rows, cols], as [cols, rows] if
/// `transposed`.
struct Normalization {
    void* y = nullptr;
    const void* x = nullptr;
    DType dtype = DType::bf16;
    int64_t count = 0, rows = 0, cols = 0;
    bool transposed = false;
    float safety = 1, epsilon = 0;
    void* norms = nullptr;
};
void normalize(Stream& stream, const Normalization& args);
/// y [count, cols, rows] = the transposes of x [count, rows, cols].
struct Transposition {
    void* y = nullptr;
    const void* x = nullptr;
    DType dtype = DType::bf16;
    int64_t count = 0, rows = 0, cols = 0;
};
void transpose(Stream& stream, const Transposition& args);
void symmetric_polynomial(Stream& stream, const SymmetricPolynomial& args);
size_t norm_bytes(int64_t count, int64_t rows, int64_t cols);

/// out = x·yᵀ (nt) or x·y (nn) for `count` matrices, at these distances from each other. The
/// algorithm is chosen for `batch` of them.
struct BatchedProduct {
    bool transposed = false;  // y is [n, k], else [k, n]
    void* out = nullptr;      // [m, n]
    const void *x = nullptr, *y = nullptr;
    DType dtype = DType::bf16;
    int64_t m = 0, n = 0, k = 0;
    int64_t out_stride = 0, x_stride = 0, y_stride = 0, count = 1, batch = 1;
};
void multiply(Stream& stream, const BatchedProduct& args);
size_t multiply_scratch_bytes(int64_t m, int64_t n, int64_t batch);
}  // namespace cuda

}  // namespace train_gpt
