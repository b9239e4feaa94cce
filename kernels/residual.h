// The sum that continues the residual stream where no norm follows it.
#pragma once
#include "base/tensor.h"
#include "device/stream.h"

namespace train_gpt {

/// out = x + residual (+ bias), in this order in fp32 and rounded once: the x_out of
/// norm_forward(). x, residual, out [M, C]; bias [C], which may be absent; fp32 or bf16, all alike.
/// out may be x or residual.
struct ResidualAdd {
    Tensor out, x, residual;
    Tensor bias = {};
};
void residual_add(Stream& stream, const ResidualAdd& args);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const ResidualAdd& args);

namespace cuda {  // residual.cu
void residual_add(Stream& stream, const ResidualAdd& args);
}  // namespace cuda

}  // namespace train_gpt
