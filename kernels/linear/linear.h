// Linear layers: Y = X·Wᵀ + b and its gradients, with the element-wise work around them as
// epilogues. Matrices are row-major; a weight is [out, in]. Floating dtypes of x, w, out, dx, dy,
// bias, residual and preact are equal (fp32 or bf16), except that out may be fp32 where residual
// and preact are absent: the logits of a router. Products are summed in fp32. In bf16 the sum, bias
// and residual are added in fp32 and rounded once where the library allows it.
#pragma once
#include <concepts>
#include <string>
#include <vector>

#include "base/tensor.h"
#include "device/stream.h"
#include "kernels/fp8.h"

namespace train_gpt {

/// How a layer's products are computed in fp8 (fp8.h): each reads its two matrices rounded, x and w
/// to e4m3 and dy to e5m2, and sums products of codes in fp32. The scales are divided out of the
/// sums, before bias, residual and activation. A product reads both matrices along the dimension
/// over which it sums, as tensor cores do. N and K are multiples of fp8_multiple, and for weight
/// gradients M is; on a GPU, what cuBLASLt refuses is computed in the dtype of x and dy.
struct ProductScales {
    Fp8Scaling x, w, dy;
    bool weight_gradient = true;  // is in fp8, too; else in the dtype of x and dy
    std::string name = {};        // as precision.fp8_skip names the layer, such as "3.down"
};
/// Codes of rows and columns come in whole 16 bytes.
inline constexpr int64_t fp8_multiple = 16;

/// A weight as products read it.
struct Operand {
    Tensor values;
    const ProductScales* scales = nullptr;  // null: products are in the dtype of the values
    /// With scales: what the products read, rounded once for many of them; on a GPU both matrices,
    /// on a CPU numbers of the values' dtype. If it is absent, each product rounds the values.
    Fp8Matrix rounded = {};

    Operand() = default;
    Operand(const Tensor& values_, const ProductScales* scales_, const Fp8Matrix& rounded_ = {})
        : values(values_), scales(scales_), rounded(rounded_) {}
    /// A tensor, or what converts to one.
    template <std::convertible_to<Tensor> T>
    Operand(const T& values_) : values(values_) {}  // NOLINT(google-explicit-constructor)
};

/// out = x·wᵀ (+ bias) (+ residual)               without preact
/// preact = x·wᵀ (+ bias), out = gelu(preact)     with preact (then no residual)
/// x [M, K], w [N, K], out, residual and preact [M, N], bias [N]. gelu is the tanh approximation
/// (gelu.h) of the stored preact; in bf16 on CUDA possibly of the value before rounding, unless
/// gelu_of_preact. residual may not alias out. Any number of rows >= 1 is allowed.
///
/// With scales on a GPU, rounded_x may be x as it has been rounded; the memory of x then has no
/// values. fp8_was_refused() must be false.
struct LinearForward {
    Tensor out, x;
    Operand w;
    Tensor bias = {}, residual = {}, preact = {};
    Fp8Matrix rounded_x = {};
    /// On CUDA, out has the bits of gelu_forward() of preact, if N is a multiple of 16, as it is
    /// where the next product is in fp8.
    bool gelu_of_preact = false;
};
void linear_forward(Stream& stream, const LinearForward& args);

/// dx = dy·w                       without preact
/// dx = (dy·w) ⊙ gelu'(preact)     with preact [M, K]: the layer's input was gelu(preact)
/// dy [M, N], w [N, K], dx [M, K]; on the CPU dx may be fp32, without preact.
///
/// With scales on a GPU, rounded_dy may be dy as it has been rounded to e5m2; dy has values, too.
/// Both gradients may read it: the input's its codes, the weight's its transpose.
struct LinearBackwardInput {
    Tensor dx, dy;
    Operand w;
    Tensor preact = {};
    Fp8Matrix rounded_dy = {};
};
void linear_backward_input(Stream& stream, const LinearBackwardInput& args);

/// dw (+)= dyᵀ·x, and dbias (+)= column sums of dy if dbias is given.
/// x [M, K], dy [M, N]; dw [N, K] and dbias [N] in fp32. rounded_x: as LinearForward, rounded_dy as
/// LinearBackwardInput.
struct LinearBackwardWeight {
    GradientSink dw;
    Tensor x, dy;
    GradientSink dbias = {};
    const ProductScales* scales = nullptr;  // as Operand::scales; sums of columns are of dy itself
    Fp8Matrix rounded_x = {}, rounded_dy = {};
};
void linear_backward_weight(Stream& stream, const LinearBackwardWeight& args);

/// The scratch memory that the three calls need for up to M rows of a layer with weight [N, K]; in
/// fp8, too, where KernelSettings::fp8 says that there are such products.
size_t linear_scratch_bytes(const Stream& stream, DType dtype, int64_t M, int64_t N, int64_t K);

/// Whether this GPU has computed a product in the dtype of its operands that was to be in fp8, as
/// cuBLASLt refused it.
bool fp8_was_refused(const Stream& stream);
/// A sentence about each of these products.
std::vector<std::string> fp8_refusals(const Stream& stream);

/// Whether the bits of products may depend on the number of threads: where oneDNN computes some.
bool products_depend_on_threads(const Stream& stream);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const LinearForward& args);
Cost cost_of(const LinearBackwardInput& args);
Cost cost_of(const LinearBackwardWeight& args);

/// The same in fp8 on the CPU (linear_fp8.cpp): what the calls above do with scales.
void linear_forward_fp8(Stream& stream, const LinearForward& args);
void linear_backward_input_fp8(Stream& stream, const LinearBackwardInput& args);
/// Without dbias.
void linear_backward_weight_fp8(Stream& stream, const LinearBackwardWeight& args);
size_t linear_fp8_scratch_bytes(const Stream& stream, DType dtype, int64_t M, int64_t N, int64_t K);

namespace cuda {  // linear.cu
void linear_forward(Stream& stream, const LinearForward& args);
void linear_backward_input(Stream& stream, const LinearBackwardInput& args);
void linear_backward_weight(Stream& stream, const LinearBackwardWeight& args);
size_t linear_scratch_bytes(DType dtype, int64_t M, int64_t N, int64_t K);
size_t linear_fp8_scratch_bytes(int64_t M, int64_t N, int64_t K);
bool fp8_was_refused(const Stream& stream);
std::vector<std::string> fp8_refusals(const Stream& stream);
}  // namespace cuda

}  // namespace train_gpt
