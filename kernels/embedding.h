// Token and position embeddings.
#pragma once
#include "base/tensor.h"
#include "device/device.h"

namespace train_gpt {

/// out[b, t, :] = wte[token[b, t], :] + wpe[position, :], position = first_position + t −
/// doc_start[b, t] (doc_start null: 0). tokens [B·T] int32, 0 <= token < rows of wte (checked by
/// the loader, not here); wte [Vp, C], wpe [n_ctx, C].
struct EmbeddingForward {
    Tensor out;  // [B, T, C]
    const int32_t* tokens = nullptr;
    Tensor wte, wpe;
    const int32_t* doc_start = nullptr;  // [B·T]
    int first_position = 0;              // sampling with a KV cache
};
void embedding_forward(Stream& stream, const EmbeddingForward& args);

/// dwte[token] += dout rows of that token. Always added, because the tied head has already written
/// dwte (head_loss.h). dwpe (+)= sums over the batch; with accumulate = false every row of dwpe
/// [n_ctx, C] is written, with zeros for positions that do not occur. The order of additions is
/// fixed by the tokens, not by the thread count.
struct EmbeddingBackward {
    GradientSink dwte, dwpe;
    Tensor dout;  // [B, T, C]
    const int32_t* tokens = nullptr;
    int64_t n_ctx = 0;
    const int32_t* doc_start = nullptr;
};
void embedding_backward(Stream& stream, const EmbeddingBackward& args);

size_t embedding_scratch_bytes(const Stream& stream, int64_t rows, int64_t vocab_rows);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const EmbeddingForward& args);
Cost cost_of(const EmbeddingBackward& args);

namespace cuda {  // embedding.cu
void embedding_forward(Stream& stream, const EmbeddingForward& args);
void embedding_backward(Stream& stream, const EmbeddingBackward& args);
size_t embedding_scratch_bytes(int64_t rows, int64_t vocab_rows);
}  // namespace cuda

}  // namespace train_gpt
