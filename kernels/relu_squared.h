// ReLU²: relu2(x) = max(x, 0)². So et al., arXiv 2109.08668.
#pragma once
#include "base/tensor.h"
#include "device/stream.h"
#include "kernels/fp8.h"

namespace train_gpt {

/// out = relu2(x), element-wise; any shape, fp32 or bf16, computed in fp32. A NaN stays a NaN. out
/// may alias x. On a GPU, `rounded` receives out in fp8 if it is there, and out itself is not
/// written; x is [R, C] then.
struct ReluSquaredForward {
    Tensor out, x;
    Fp8Output rounded = {};
};
void relu_squared_forward(Stream& stream, const ReluSquaredForward& args);

/// dx = dout ⊙ 2·max(x, 0), and the forward pass's out once more if `out` is given, with the same
/// bits; so it need not be kept until then. All of one shape and dtype. dx may be dout.
struct ReluSquaredBackward {
    Tensor dx, dout, x;
    Tensor out = {};
};
void relu_squared_backward(Stream& stream, const ReluSquaredBackward& args);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const ReluSquaredForward& args);
Cost cost_of(const ReluSquaredBackward& args);

namespace cuda {  // relu_squared.cu
void relu_squared_forward(Stream& stream, const ReluSquaredForward& args);
void relu_squared_backward(Stream& stream, const ReluSquaredBackward& args);
}  // namespace cuda

}  // namespace train_gpt
