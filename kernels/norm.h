// Normalisation over the last dimension. With x̂ = (x − μ)·ρ, y = x̂ ⊙ w + b:
//   layer   μ = mean(x), ρ = 1 / √(mean((x − μ)²) + ε)    Ba, Kiros & Hinton, arXiv 1607.06450
//   rms     μ = 0,       ρ = 1 / √(mean(x²) + ε)          Zhang & Sennrich, arXiv 1910.07467
// Statistics and sums in fp32.
#pragma once
#include "base/tensor.h"
#include "device/stream.h"
#include "kernels/fp8.h"

namespace train_gpt {

enum class Norm : uint8_t { layer, rms };

/// out = norm(x), or with x_out, in one pass: x_out = x + residual (+ bias), out = norm(x_out), of
/// the rounded x_out.
/// x, out, residual, x_out [M, C]; w, b, bias [C] of the same dtype (fp32 or bf16); b may be
/// absent. stats fp32 [M, 2] receives (μ, ρ) of each row; it may be absent (inference). out may not
/// alias x, x_out or residual; x_out may be x or residual.
///
/// Where norm_rounds(), `rounded` receives out in fp8, and out itself is not written.
struct NormForward {
    Norm norm = Norm::layer;
    Tensor out, stats, x, w;
    Tensor b = {};
    Tensor residual = {}, bias = {}, x_out = {};
    float epsilon = 1e-5f;
    Fp8Output rounded = {};
};
void norm_forward(Stream& stream, const NormForward& args);
/// On a GPU, for M and C that are multiples of 16 and rows of which a block's shared memory holds
/// the codes of eight: C <= 20,480 (fp32) or 29,008 (bf16) in 227 KB, and 12,624 in 99 KB.
bool norm_rounds(const Stream& stream, DType dtype, int64_t M, int64_t C);

/// The backward pass through y = norm(x) where x also continues along the residual stream:
///   dres  +=  ρ·(g − mean(g) − x̂·mean(g ⊙ x̂)),  g = dy ⊙ w;  rms: without mean(g)
///   dw   (+)=  Σ_rows dy ⊙ x̂        db (+)= Σ_rows dy, if there is a b
///   dbias (+)= Σ_rows dres (after the update): the bias gradient of the linear layer whose output
///   was added into x.
/// dy, x, dres [M, C]; w [C]; stats [M, 2]; dw, db, dbias fp32 [C]. overwrite_dres: dres is written
/// instead of added to (for the final norm, which has no residual stream after it). After the
/// adding form, x is its x_out.
struct NormBackward {
    Norm norm = Norm::layer;
    Tensor dres;
    GradientSink dw, db = {};
    Tensor dy, x, w, stats;
    GradientSink dbias = {};
    bool overwrite_dres = false;
};
void norm_backward(Stream& stream, const NormBackward& args);

size_t norm_scratch_bytes(const Stream& stream, int64_t M, int64_t C);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const NormForward& args);
Cost cost_of(const NormBackward& args);

namespace cuda {  // norm.cu, norm_fp8.cu, norm_backward.cu
void norm_forward(Stream& stream, const NormForward& args);
void norm_forward_rounded(Stream& stream, const NormForward& args);
bool norm_rounds(const Stream& stream, DType dtype, int64_t M, int64_t C);
void norm_backward(Stream& stream, const NormBackward& args);
size_t norm_scratch_bytes(int64_t M, int64_t C);
}  // namespace cuda

}  // namespace train_gpt
