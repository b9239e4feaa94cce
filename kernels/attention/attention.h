// Causal softmax attention in tiles, without a T×T buffer. Dao et al., arXiv 2205.14135 and
// 2307.08691.
#pragma once
#include "base/tensor.h"
#include "device/stream.h"
#include "kernels/heads_view.h"

namespace train_gpt {

/// Query t (of T) is at position t + S − T among S keys, T <= S, and sees the keys s <= that
/// position. T = S: a whole sequence; T < S: the queries of its end, as with a KV cache or in a
/// rank's chunk of a sequence that is split over ranks. If doc_start is given, it sees only those
/// with s >= doc_start[b, t]. With a window it sees only its own position and the window − 1
/// positions before it (Beltagy et al., arXiv 2004.05150); keys that no query of a tile sees cost
/// nothing. H query heads share H_kv key/value heads, H % H_kv == 0; query head h uses key head h /
/// (H / H_kv). 1 <= D <= 256.
struct AttentionShape {
    DType dtype = DType::fp32;
    int B = 0, T = 0, S = 0, H = 0, H_kv = 0, D = 0;
    float scale = 0;                     // of q·k; usually 1/√D
    float softcap = 0;                   // c, if not 0: a score s counts as c·tanh(s / c)
    const int32_t* doc_start = nullptr;  // [B, T], absolute key positions; null: one document
    int window = 0;                      // 0: none, as with window >= S
};

/// out = softmax(s + mask)·v with scores s = scale·q·kᵀ, or softcap·tanh(scale·q·kᵀ / softcap)
/// (kernels/softcap_math.h); lse [B, H, T] fp32 (or null) receives log Σ exp of each row of scores.
/// sinks [H], fp32 or bf16, may be absent. Each row of scores of head h then has one more score,
/// sinks[h], neither scaled nor capped, whose value is zero: out = Σ_s exp(s − lse)·v, and lse has
/// the term exp(sinks[h]) too. (gpt-oss; Xiao et al., arXiv 2309.17453.)
struct AttentionForward {
    AttentionShape shape;
    HeadsView q, k, v, out;
    float* lse = nullptr;
    Tensor sinks = {};
};
void attention_forward(Stream& stream, const AttentionForward& args);

/// What attention_backward does with dk and dv. The gradients of keys whose queries come in several
/// calls are summed in fp32: the call with the most keys writes them, the others add theirs.
enum class KeyGradients : uint8_t {
    write,       // dk and dv are views of shape.dtype
    write_fp32,  // views of fp32
    add_fp32,    // views of fp32, which hold the sums of earlier calls
};

/// Gradients of attention_forward: with p = exp(s − lse) where a query sees a key, else 0, and ds =
/// scale·p ⊙ (dout·vᵀ − Σ dout ⊙ out), with a soft-cap times 1 − (s / softcap)²: dq = ds·k, dk =
/// dsᵀ·q, dv = pᵀ·dout; dk and dv sum over the query heads of a key head. T <= S; T = 0 only with S
/// = 0. dq is written; dk and dv as key_gradients says, each of the S rows, no others. They may be
/// views of one packed tensor, but overlap no input. out, lse: as the forward pass left them. With
/// sinks, these formulas stay as they are, and dsinks, fp32 [H], may be given: dsinks[h] (+)=
/// −Σ_{b, t} exp(sinks[h] − lse)·Σ_d dout ⊙ out. Deterministic, without atomics.
struct AttentionBackward {
    AttentionShape shape;
    HeadsView q, k, v, out, dout;
    const float* lse = nullptr;
    HeadsView dq, dk, dv;
    KeyGradients key_gradients = KeyGradients::write;
    Tensor sinks = {};
    GradientSink dsinks = {};
};
void attention_backward(Stream& stream, const AttentionBackward& args);

/// The scratch memory of either pass, and of the forward pass alone. Sinks do not change it, and a
/// window never makes it larger.
size_t attention_scratch_bytes(const Stream& stream, const AttentionShape& shape);
size_t attention_forward_scratch_bytes(const Stream& stream, const AttentionShape& shape);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const AttentionForward& args);
Cost cost_of(const AttentionBackward& args);

namespace cuda {  // attention.cu
void attention_forward(Stream& stream, const AttentionForward& args);
void attention_backward(Stream& stream, const AttentionBackward& args);
size_t attention_scratch_bytes(const Stream& stream, const AttentionShape& shape);
size_t attention_forward_scratch_bytes(const Stream& stream, const AttentionShape& shape);
}  // namespace cuda

}  // namespace train_gpt
