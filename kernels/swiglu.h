// SwiGLU, the gated unit of Llama-class models: silu(gate) ⊙ up with silu(x) = x·σ(x) =
// x / (1 + e^−x). Shazeer, arXiv 2002.05202.
#pragma once
#include "base/tensor.h"
#include "device/stream.h"

namespace train_gpt {

/// out = silu(gate) ⊙ up, computed in fp32. gate_up [M, 2F] holds gate in the first F columns of a
/// row and up in the last F; out [M, F]; fp32 or bf16, both alike. out may not overlap gate_up.
struct SwigluForward {
    Tensor out, gate_up;
};
void swiglu_forward(Stream& stream, const SwigluForward& args);

/// The gradient of gate and up, and the forward pass's out once more if `out` is given, with the
/// same bits; so it need not be kept until then:
///   dgate = dout ⊙ up ⊙ silu'(gate), silu'(x) = σ(x)·(1 + x·(1 − σ(x)))
///   dup   = dout ⊙ silu(gate)
/// dout, out [M, F], dgate_up, gate_up [M, 2F]. dgate_up may be gate_up, and out may be dout.
struct SwigluBackward {
    Tensor dgate_up, dout, gate_up;
    Tensor out = {};
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
