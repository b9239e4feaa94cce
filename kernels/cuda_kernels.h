// The CUDA implementations of the contracts, each in the X.cu beside its X.cpp, which hands calls on to them
// (TRAIN_GPT_ON_CUDA in device.h). What they do is said in X.h.
#pragma once
#include "kernels/adamw.h"
#include "kernels/attention.h"
#include "kernels/convert.h"
#include "kernels/copy.h"
#include "kernels/embedding.h"
#include "kernels/gelu.h"
#include "kernels/head_loss.h"
#include "kernels/layernorm.h"
#include "kernels/linear.h"

namespace train_gpt::cuda {

void copy_rows(Stream& stream, void* to, size_t to_stride, const void* from, size_t from_stride,
               size_t row_bytes, int64_t rows);
void copy(Stream& stream, void* to, const void* from, size_t bytes);
void copy_now(const Device& device, void* to, const void* from, size_t bytes);
void clear(Stream& stream, void* memory, size_t bytes);

void round_to_bf16(Stream& stream, bf16* to, const float* from, int64_t n);
void widen(Stream& stream, float* to, const void* from, DType from_dtype, int64_t n,
           bool accumulate);

void linear_forward(Stream& stream, const LinearForward& args);
void linear_backward_input(Stream& stream, const LinearBackwardInput& args);
void linear_backward_weight(Stream& stream, const LinearBackwardWeight& args);
size_t linear_scratch_bytes(DType dtype, int64_t M, int64_t N, int64_t K);

void gelu_forward(Stream& stream, Tensor out, Tensor x);

void layernorm_forward(Stream& stream, const LayerNormForward& args);
void layernorm_backward(Stream& stream, const LayerNormBackward& args);
size_t layernorm_scratch_bytes(int64_t M, int64_t C);

void attention_forward(Stream& stream, const AttentionForward& args);
void attention_backward(Stream& stream, const AttentionBackward& args);
size_t attention_scratch_bytes(const AttentionShape& shape);

void embedding_forward(Stream& stream, const EmbeddingForward& args);
void embedding_backward(Stream& stream, const EmbeddingBackward& args);
size_t embedding_scratch_bytes(int64_t rows, int64_t vocab_rows);

void head_loss(Stream& stream, const HeadLoss& args);
void head_logits(Stream& stream, Tensor out, Tensor x, Tensor w, Tensor scratch_logits);
void softmax_stats(Stream& stream, Tensor stats, Tensor logits, const int32_t* targets,
                   int64_t first_column, int64_t columns);
void softmax_backward(Stream& stream, Tensor logits, Tensor stats, const int32_t* targets,
                      int64_t first_column, int64_t columns);
void accumulate_loss(Stream& stream, double* total, const float* losses, int64_t n,
                     bool accumulate);
void accumulate_loss_by_source(Stream& stream, const LossBySource& args);
size_t head_loss_scratch_bytes(DType dtype, int64_t chunk, int64_t Vp, int64_t C);

void norm_partials(Stream& stream, std::span<const NormSegment> segments);
void finish_norm(Stream& stream, StepState* state, const double* partials,
                 std::span<const int64_t> counts, float scale, float clip);
void adamw(Stream& stream, std::span<const AdamWSegment> segments, const AdamWStep& args);

}  // namespace train_gpt::cuda
