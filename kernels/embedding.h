// Token and position embeddings.
#pragma once
#include "base/tensor.h"
#include "device/stream.h"

namespace train_gpt {

/// out[b, t, :] = w[token[b, t] − first_token, :] + positions[p, :]
/// p = first_position + t − doc_start[b, t], 0 <= p < n_ctx; without doc_start, p = first_position
/// + t
///
/// doc_start may be negative, or differ from token to token. So row t can be at any position, as in
/// chunks of a sequence that is split over ranks. tokens [B·T] int32 are not negative: the loader
/// checks this. w [rows, C] may hold a range of the vocabulary: a token outside [first_token,
/// first_token + rows) counts as a row of zeros. positions [n_ctx, C] may be absent: then nothing
/// is added. The sum over parts of a vocabulary, one of them with positions, is the whole.
struct EmbeddingForward {
    Tensor out;  // [B, T, C]
    const int32_t* tokens = nullptr;
    Tensor w, positions = {};
    const int32_t* doc_start = nullptr;  // [B·T]
    int first_position = 0;              // sampling with a KV cache
    int64_t first_token = 0;
};
void embedding_forward(Stream& stream, const EmbeddingForward& args);

/// dw[token − first_token] (+)= sum of the dout rows of that token; dpositions[p] (+)= sum over the
/// batch. A sink that does not accumulate gets every row written, with zeros for tokens and
/// positions that do not occur. Either sink may be absent. Only the tokens in [first_token,
/// first_token + vocab_rows) count. The order of additions is fixed by the tokens, not by the
/// thread count. If dw is exact (ExactRows), each sum of rows is rounded once and added to dw's.
struct EmbeddingBackward {
    GradientSink dw, dpositions;  // [vocab_rows, C], [n_ctx, C]
    Tensor dout;                  // [B, T, C]
    const int32_t* tokens = nullptr;
    int64_t vocab_rows = 0, n_ctx = 0;
    const int32_t* doc_start = nullptr;
    int64_t first_token = 0;
};
void embedding_backward(Stream& stream, const EmbeddingBackward& args);

size_t embedding_scratch_bytes(const Stream& stream, int64_t rows, int64_t vocab_rows);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const EmbeddingForward& args);
Cost cost_of(const EmbeddingBackward& args);

namespace cuda {  // embedding.cu
void embedding_forward(Stream& stream, const EmbeddingForward& args);
void embedding_backward(Stream& stream, const EmbeddingBackward& args);
size_t embedding_scratch_bytes(const Device& device, int64_t rows);
}  // namespace cuda

}  // namespace train_gpt
