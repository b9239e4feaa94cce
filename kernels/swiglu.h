// SwiGLU, the gated unit of Llama-class models: silu(gate) ⊙ up with silu(x) = x·σ(x) =
// x / (1 + e^−x). Shazeer, arXiv 2002.05202. And its clamped form, which gpt-oss has: OpenAI, arXiv
// 2508.10925.
#pragma once
#include <optional>

#include "base/tensor.h"
#include "device/stream.h"
#include "kernels/fp8.h"

namespace train_gpt {

/// The clamped form. With g = min(gate, limit) and u = min(max(up, −limit), limit):
///   out   = (u + 1) ⊙ g ⊙ σ(α·g)
///   dgate = dout ⊙ (u + 1) ⊙ σ(α·g)·(1 + α·g·(1 − σ(α·g)))   where gate <= limit, else 0
///   dup   = dout ⊙ g ⊙ σ(α·g)                               where |up| <= limit, else 0
/// α and limit are above 0. A NaN stays a NaN.
struct ClampedSwiglu {
    float alpha = 1.702f, limit = 7.0f;

    bool operator==(const ClampedSwiglu&) const = default;
};

/// out = silu(gate) ⊙ up, or the clamped form, computed in fp32. gate_up [M, 2F] holds gate in the
/// first F columns of a row and up in the last F; out [M, F]; fp32 or bf16, both alike. out may not
/// overlap gate_up. With row_count, int32 [1] in the device's memory, only the first so many rows
/// are read and written; at most M. On a GPU and without row_count, `rounded` receives out in fp8
/// if it is there, and out itself is not written.
struct SwigluForward {
    Tensor out, gate_up;
    std::optional<ClampedSwiglu> clamped = {};
    Tensor row_count = {};
    Fp8Output rounded = {};
};
void swiglu_forward(Stream& stream, const SwigluForward& args);

/// The gradient of gate and up, and the forward pass's out once more if `out` is given, with the
/// same bits; so it need not be kept until then:
///   dgate = dout ⊙ up ⊙ silu'(gate), silu'(x) = σ(x)·(1 + x·(1 − σ(x)))
///   dup   = dout ⊙ silu(gate)
/// or the gradients of the clamped form.
/// dout, out [M, F], dgate_up, gate_up [M, 2F]. dgate_up may be gate_up, and out may be dout.
struct SwigluBackward {
    Tensor dgate_up, dout, gate_up;
    Tensor out = {};
    std::optional<ClampedSwiglu> clamped = {};
    Tensor row_count = {};
};
void swiglu_backward(Stream& stream, const SwigluBackward& args);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const SwigluForward& args);
Cost cost_of(const SwigluBackward& args);

namespace cuda {  // swiglu.cu
void swiglu_forward(Stream& stream, const SwigluForward& args);
void swiglu_backward(Stream& stream, const SwigluBackward& args);
}  // namespace cuda

}  // namespace train_gpt
