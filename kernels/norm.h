// Layer normalisation over the last dimension: y = (x − μ)·ρ ⊙ w + b with ρ = 1 / √(σ² + ε).
// Ba, Kiros & Hinton, arXiv 1607.06450. Statistics and sums in fp32.
#pragma once
#include "base/tensor.h"
#include "device/device.h"

namespace train_gpt {

/// x, out [M, C]; w, b [C] of the same dtype (fp32 or bf16); stats fp32 [M, 2] holds (μ, ρ) of each
/// row. out may not alias x. stats may be absent (inference).
struct LayerNormForward {
    Tensor out, stats, x, w, b;
    float epsilon = 1e-5f;
};
void layernorm_forward(Stream& stream, const LayerNormForward& args);

/// The backward pass through y = layernorm(x) where x also continues along the residual stream:
///   dres  +=  ρ·(g − mean(g) − x̂·mean(g ⊙ x̂)),  g = dy ⊙ w,  x̂ = (x − μ)·ρ
///   dw   (+)=  Σ_rows dy ⊙ x̂        db (+)= Σ_rows dy
///   dbias (+)= Σ_rows dres (after the update): the bias gradient of the linear layer whose output
///   was added into x.
/// dy, x, dres [M, C]; w [C]; stats [M, 2]; dw, db, dbias fp32 [C]. overwrite_dres: dres is written
/// instead of added to (for the final layer norm, which has no residual stream after it).
struct LayerNormBackward {
    Tensor dres;
    GradientSink dw, db;
    Tensor dy, x, w, stats;
    GradientSink dbias = {};
    bool overwrite_dres = false;
};
void layernorm_backward(Stream& stream, const LayerNormBackward& args);

size_t layernorm_scratch_bytes(const Stream& stream, int64_t M, int64_t C);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const LayerNormForward& args);
Cost cost_of(const LayerNormBackward& args);

namespace cuda {  // layernorm.cu
void layernorm_forward(Stream& stream, const LayerNormForward& args);
void layernorm_backward(Stream& stream, const LayerNormBackward& args);
size_t layernorm_scratch_bytes(int64_t M, int64_t C);
}  // namespace cuda

}  // namespace train_gpt
