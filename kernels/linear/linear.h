// Linear layers: Y = X·Wᵀ + b and its gradients, with the element-wise work around them as
// epilogues. Matrices are row-major; a weight is [out, in]. Floating dtypes of x, w, out, dx, dy,
// bias, residual and preact are equal (fp32 or bf16), except that out may be fp32 where residual
// and preact are absent: the logits of a router. Products are summed in fp32. In bf16 the sum, bias
// and residual are added in fp32 and rounded once where the library allows it.
#pragma once
#include "base/tensor.h"
#include "device/stream.h"

namespace train_gpt {

/// out = x·wᵀ (+ bias) (+ residual)               without preact
/// preact = x·wᵀ (+ bias), out = gelu(preact)     with preact (then no residual)
/// x [M, K], w [N, K], out, residual and preact [M, N], bias [N]. gelu is the tanh approximation
/// (gelu.h) of the stored preact (in bf16 on CUDA, possibly of the value before rounding). residual
/// may not alias out. Any number of rows >= 1 is allowed.
struct LinearForward {
    Tensor out, x, w;
    Tensor bias = {}, residual = {}, preact = {};
};
void linear_forward(Stream& stream, const LinearForward& args);

/// dx = dy·w                       without preact
/// dx = (dy·w) ⊙ gelu'(preact)     with preact [M, K]: the layer's input was gelu(preact)
/// dy [M, N], w [N, K], dx [M, K].
struct LinearBackwardInput {
    Tensor dx, dy, w;
    Tensor preact = {};
};
void linear_backward_input(Stream& stream, const LinearBackwardInput& args);

/// dw (+)= dyᵀ·x, and dbias (+)= column sums of dy if dbias is given.
/// x [M, K], dy [M, N]; dw [N, K] and dbias [N] in fp32.
struct LinearBackwardWeight {
    GradientSink dw;
    Tensor x, dy;
    GradientSink dbias = {};
};
void linear_backward_weight(Stream& stream, const LinearBackwardWeight& args);

/// The scratch memory that the three calls need for up to M rows of a layer with weight [N, K].
size_t linear_scratch_bytes(const Stream& stream, DType dtype, int64_t M, int64_t N, int64_t K);

/// Whether the bits of products may depend on the number of threads: where oneDNN computes some.
bool products_depend_on_threads(const Stream& stream);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const LinearForward& args);
Cost cost_of(const LinearBackwardInput& args);
Cost cost_of(const LinearBackwardWeight& args);

namespace cuda {  // linear.cu
void linear_forward(Stream& stream, const LinearForward& args);
void linear_backward_input(Stream& stream, const LinearBackwardInput& args);
void linear_backward_weight(Stream& stream, const LinearBackwardWeight& args);
size_t linear_scratch_bytes(DType dtype, int64_t M, int64_t N, int64_t K);
}  // namespace cuda

}  // namespace train_gpt
