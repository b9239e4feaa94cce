// Rotary position embedding of queries and keys, with an optional RMS norm of each head before it
// in the same pass. Su et al., arXiv 2104.09864; the norm: Henry et al., arXiv 2010.04245.
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

/// RMS norm of each head x [D]: x·ρ ⊙ w, ρ = 1 / √(mean(x²) + ε). Absent weights: no norm.
struct QkNorm {
    Tensor q_w = {}, k_w = {};  // [D], of the dtype of q and k
    float epsilon = 1e-6f;
};

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
size_t rope_scratch_bytes(const Stream& stream, const RopeShape& shape);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const RopeForward& args);
Cost cost_of(const RopeBackward& args);

namespace cuda {  // rope.cu
void rope_forward(Stream& stream, const RopeForward& args);
void rope_backward(Stream& stream, const RopeBackward& args);
size_t rope_scratch_bytes(const RopeShape& shape);
}  // namespace cuda

}  // namespace train_gpt
