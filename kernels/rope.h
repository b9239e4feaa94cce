// Rotary position embedding of queries and keys, with an optional RMS norm before it in the same
// pass: of each head, or of all of a token's heads together, as OLMoE has it. Su et al., arXiv
// 2104.09864; the norm: Henry et al., arXiv 2010.04245; Muennighoff et al., arXiv 2409.02060.
#pragma once
#include "base/tensor.h"
#include "device/stream.h"
#include "kernels/heads_view.h"

namespace train_gpt {

/// Token (b, t) is at position p = first_position + t − doc_start[b, t] (doc_start null: 0), so
/// that positions begin at 0 in each document. first_position > 0: the tokens after those in a KV
/// cache. doc_start may be negative: then t is a row in chunks of a sequence that is split over
/// ranks, which is at a later position. 2 <= D <= 256, even; 0 <= p < n_ctx.
struct RopeShape {
    DType dtype = DType::fp32;  // fp32 or bf16
    int B = 0, T = 0, H = 0, H_kv = 0, D = 0;
    Tensor table = {};  // fp32 [n_ctx, D], of rope_table.h
    int64_t first_position = 0;
    const int32_t* doc_start = nullptr;  // [B, T]
};

/// A norm over the whole width of q and of k. Their heads may be divided over ranks, so their sums
/// are computed by calls of their own (QkNormSums, QkNormDots) and then added over the ranks.
struct QkNormWidth {
    int H = 0, H_kv = 0;  // the heads of all ranks
    Tensor sums = {};     // fp32 [B·T, 2]: Σ q² and Σ k² of each token
    Tensor dots = {};  // fp32 [B·T, 2]: Σ g ⊙ w ⊙ q and Σ g ⊙ w ⊙ k; for the backward pass alone
};

/// RMS norm x·ρ ⊙ w, ρ = 1 / √(mean(x²) + ε), in one of two forms:
///   of each head x [D]; q_w and k_w [D]
///   with width.sums: of the heads of a token together; the mean is over D times the heads of all
///   ranks. q_w [H·D] and k_w [H_kv·D] are the weights of this rank's heads.
/// Absent weights: no norm. Weights have the dtype of q and k.
struct QkNorm {
    Tensor q_w = {}, k_w = {};
    float epsilon = 1e-6f;
    QkNormWidth width = {};
};

/// The first step of a norm over the whole width: sums [B·T, 2] = Σ q² and Σ k² of each token over
/// this rank's heads, in fp32 and a fixed order. The shape's table and doc_start are not used.
struct QkNormSums {
    RopeShape shape;
    HeadsView q, k;
    Tensor sums;
};
void qk_norm_sums(Stream& stream, const QkNormSums& args);

/// The first step of its backward pass: dots [B·T, 2] = Σ g ⊙ q_w ⊙ q and Σ g ⊙ k_w ⊙ k of each
/// token over this rank's heads, where g is dq or dk turned by −α (RopeBackward). In fp32 and a
/// fixed order. q and k are what the forward pass has read.
struct QkNormDots {
    RopeShape shape;
    HeadsView dq, dk, q, k;
    Tensor q_w, k_w;  // [H·D], [H_kv·D]
    Tensor dots;
};
void qk_norm_dots(Stream& stream, const QkNormDots& args);

/// For each head x of q [B, T, H, D] and of k [B, T, H_kv, D], n = x or its norm, and each pair of
/// elements i and i + D/2 with the angle α of its frequency at position p:
///   out_i       = n_i·cos α − n_(i+D/2)·sin α
///   out_(i+D/2) = n_(i+D/2)·cos α + n_i·sin α
/// In fp32, rounded once. q_out may be q, and k_out may be k (in place), but not where there is a
/// norm and a backward pass will follow.
struct RopeForward {
    RopeShape shape;
    HeadsView q, k, q_out, k_out;
    QkNorm norm = {};
};
void rope_forward(Stream& stream, const RopeForward& args);

/// The backward pass, in place: dq and dk hold the gradients of q_out and k_out, and receive the
/// gradients of q and k. It turns the gradients by −α; g is the result, for a head x:
///   without a norm  dx = g
///   with a norm     dx = ρ·(g ⊙ w − x̂·mean(g ⊙ w ⊙ x̂)),  x̂ = x·ρ
///                   dq_w (+)= Σ g ⊙ x̂ over the tokens and heads of q, in fp32
///                   dk_w (+)= Σ g ⊙ x̂ over the tokens and heads of k, in fp32
/// With a norm over the whole width, ρ comes from width.sums and the mean is ρ·width.dots / (D
/// times the heads of all ranks); dq_w [H·D] and dk_w [H_kv·D] are sums over the tokens alone.
/// With a norm, q and k are what the forward pass has read. Without a norm, q and k are not used. ρ
/// is not kept: it is computed once more from q and k, which are read anyway. (From the rotated
/// values, the weights' gradients would be quotients by the weights, which may be 0, and no fewer
/// bytes would be moved.) Deterministic, without atomics.
struct RopeBackward {
    RopeShape shape;
    HeadsView dq, dk;
    HeadsView q = {}, k = {};
    QkNorm norm = {};
    GradientSink dq_w = {}, dk_w = {};
};
void rope_backward(Stream& stream, const RopeBackward& args);

/// The scratch memory of a backward pass with a norm; without one, none is needed.
size_t rope_scratch_bytes(const Stream& stream, const RopeShape& shape, bool whole_width = false);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const QkNormSums& args);
Cost cost_of(const QkNormDots& args);
Cost cost_of(const RopeForward& args);
Cost cost_of(const RopeBackward& args);

namespace cuda {  // rope.cu
void qk_norm_sums(Stream& stream, const QkNormSums& args);
void qk_norm_dots(Stream& stream, const QkNormDots& args);
void rope_forward(Stream& stream, const RopeForward& args);
void rope_backward(Stream& stream, const RopeBackward& args);
size_t rope_scratch_bytes(const RopeShape& shape, bool whole_width);
}  // namespace cuda

}  // namespace train_gpt
