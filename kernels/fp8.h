// Matrices in fp8: a byte for each element and one scale for the whole tensor. e4m3 has 4
// significant bits and numbers up to 448; e5m2 has 3, and numbers up to 57,344. Micikevicius et
// al., arXiv 2209.05433.
//
//   code = round(scale · x)      x ≈ code / scale
//
// The scale follows from the largest magnitude, amax: scale = largest number of the format / amax.
// With `current` scaling it is this tensor's own. With `delayed` scaling it is the largest of the
// last steps, so that one pass over the tensor is enough; a larger magnitude then saturates.
#pragma once
#include <cstdint>
#include <vector>

#include "base/tensor.h"
#include "device/stream.h"
#include "kernels/adamw.h"

namespace train_gpt {

enum class Fp8Format : uint8_t { e4m3, e5m2 };

/// From one matrix's reciprocal to the next where they lie in one array: cuBLASLt (seen in
/// 13.1) multiplies only with scales at multiples of 16 bytes.
constexpr int64_t fp8_inverse_stride = 16 / sizeof(float);

/// How one operand of a product is scaled. The addresses are in the device's memory.
struct Fp8Scaling {
    /// Null, or a number that is 0: this call's amax decides.
    const float* scale = nullptr;
    /// Becomes the larger of itself and this call's amax, ∞ for NaN; null: nobody asks.
    float* amax = nullptr;
    /// *scale is known not to be 0, so that no pass over the tensor looks for its amax first.
    bool is_set = false;
    /// Where a kernel that rounds its own result, an activation, writes 1 / *scale, at a multiple
    /// of 16 bytes; may be null.
    float* inverse = nullptr;
};

/// What fp8_round() has written of a matrix: either of both, and the reciprocal of its scale, at a
/// multiple of 16 bytes.
struct Fp8Matrix {
    Tensor codes = {}, transposed = {};
    const float* inverse = nullptr;

    explicit operator bool() const { return inverse != nullptr; }
};

/// Where a kernel writes its result rounded to e4m3 instead of its values: what fp8_round() would
/// give of the values in their dtype, bit for bit. The scale is_set.
struct Fp8Output {
    Tensor codes = {}, transposed = {};
    Fp8Scaling scaling = {};

    explicit operator bool() const { return codes || transposed; }
    Fp8Matrix matrix() const { return {codes, transposed, scaling.inverse}; }
};

/// codes = round(scale · x), uint8 like x [R, C]; transposed [C, R] the same of xᵀ; either may be
/// absent. inverse = 1 / scale, fp32 [1]. Rounds to nearest, ties to even; finite numbers beyond
/// the largest one saturate, and ±∞ and NaN become NaN. x is fp32 or bf16. On the CPU, codes may be
/// of x's dtype instead, which holds the numbers of the codes exactly. With row_count, int32 [1] in
/// the device's memory, only the first so many rows are read and written; at most R, and without
/// `transposed`.
struct Fp8Round {
    Tensor codes = {}, transposed = {};
    float* inverse = nullptr;
    Tensor x;
    Fp8Format format = Fp8Format::e4m3;
    Fp8Scaling scaling = {};
    Tensor row_count = {};
};
void fp8_round(Stream& stream, const Fp8Round& args);

/// The scratch memory that a call needs.
size_t fp8_round_scratch_bytes(const Stream& stream);

/// What a step's operands did.
struct Fp8Found {
    int64_t steps = 0;        // that the history has taken so far
    int32_t saturated = 0;    // operands whose largest magnitude was brought down
    int32_t not_finite = -1;  // the first operand that was not finite; −1: none
    int32_t unset = 0;        // operands whose next scale is 0
};

/// Says what the step's amax [n] show. history [H, n] is a ring of the steps' amax; found->steps
/// counts them. Takes amax as the next one and sets scale [n] = largest / (the largest amax in the
/// history), 0 while all steps had 0, unless AdamW changes nothing in this step (StepState). Where
/// the last H steps had 0, the amax before them counts as this step's, so that a scale never
/// becomes 0 again. The first e4m3_count operands are e4m3, the others e5m2. Without `scale`
/// (current scaling), steps are counted and no more.
struct Fp8Update {
    float *history = nullptr, *scale = nullptr;
    const float* amax = nullptr;
    Fp8Found* found = nullptr;
    int64_t H = 0, n = 0, e4m3_count = 0;
};
void fp8_update(Stream& stream, const Fp8Update& args, const StepState* state);

Cost cost_of(const Fp8Round& args);

namespace cuda {  // fp8.cu
void fp8_round(Stream& stream, const Fp8Round& args);
size_t fp8_round_scratch_bytes();
void fp8_update(Stream& stream, const Fp8Update& args, const StepState* state);
}  // namespace cuda

}  // namespace train_gpt
