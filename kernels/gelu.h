// GELU, tanh approximation: gelu(x) = ½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))). Hendrycks & Gimpel,
// arXiv 1606.08415.
#pragma once
#include "base/tensor.h"
#include "device/stream.h"
#include "kernels/fp8.h"

namespace train_gpt {

/// out = gelu(x), element-wise; any shape, fp32 or bf16, computed in fp32. out may alias x.
void gelu_forward(Stream& stream, Tensor out, Tensor x);

/// On a GPU: the same of x [R, C], rounded to fp8 instead.
void gelu_forward_rounded(Stream& stream, const Fp8Output& out, Tensor x);

namespace cuda {  // gelu.cu
void gelu_forward(Stream& stream, Tensor out, Tensor x);
void gelu_forward_rounded(Stream& stream, const Fp8Output& out, Tensor x);
}  // namespace cuda

}  // namespace train_gpt
