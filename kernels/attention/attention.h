// Causal softmax attention in tiles, without a T×T buffer. Dao et al., arXiv 2205.14135 and
// 2307.08691.
#pragma once
#include "base/tensor.h"
#include "device/device.h"

namespace train_gpt {

/// Element (b, t, h, d) of a query, key, value or output is data[b·batch + t·token + h·head + d];
/// strides in elements. The kernels treat packed QKV [B, T, 3, H, D], separate tensors and a KV
/// cache alike.
struct HeadsView {
    void* data = nullptr;
    int64_t batch = 0, token = 0, head = 0;
};

/// Query t (of T) is at position t + S − T among S keys and sees the keys s <= that position (T = S
/// in training; T < S with a KV cache). If doc_start is given, it sees only those with s >=
/// doc_start[b, t]. H query heads share H_kv key/value heads, H % H_kv == 0; query head h uses key
/// head h / (H / H_kv). 1 <= D <= 256.
struct AttentionShape {
    DType dtype = DType::fp32;
    int B = 0, T = 0, S = 0, H = 0, H_kv = 0, D = 0;
    float scale = 0;                     // of q·k; usually 1/√D
    const int32_t* doc_start = nullptr;  // [B, T], absolute key positions; null: one document
};

/// out = softmax(scale·q·kᵀ + mask)·v; lse [B, H, T] fp32 (or null) receives log Σ exp of each row
/// of scores.
struct AttentionForward {
    AttentionShape shape;
    HeadsView q, k, v, out;
    float* lse = nullptr;
};
void attention_forward(Stream& stream, const AttentionForward& args);

/// Gradients of attention_forward (T = S); dq, dk, dv are written, not added to. They may be views
/// of one packed tensor. out, lse: as the forward pass left them. Deterministic, without atomics.
struct AttentionBackward {
    AttentionShape shape;
    HeadsView q, k, v, out, dout;
    const float* lse = nullptr;
    HeadsView dq, dk, dv;
};
void attention_backward(Stream& stream, const AttentionBackward& args);

size_t attention_scratch_bytes(const Stream& stream, const AttentionShape& shape);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const AttentionForward& args);
Cost cost_of(const AttentionBackward& args);

namespace cuda {  // attention.cu
void attention_forward(Stream& stream, const AttentionForward& args);
void attention_backward(Stream& stream, const AttentionBackward& args);
size_t attention_scratch_bytes(const Stream& stream, const AttentionShape& shape);
}  // namespace cuda

}  // namespace train_gpt
