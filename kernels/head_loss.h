// The head of a language model as one operation: final linear layer, softmax and cross-entropy, in
// chunks of rows. The full logits [B·T, V] never have to exist; a chunk's logits are turned into
// their gradient in place.
#pragma once
#include "base/tensor.h"
#include "device/device.h"

namespace train_gpt {

/// With z = x·wᵀ (row r, vocabulary entries j < V; entries V <= j < Vp are padding and count as
/// −∞):
///   losses[r] = log Σ_j exp z_rj − z_r,target    (nats; 0 where target is −1, which is ignored)
/// and, when dx is given,
///   dz_rj = softmax(z_r)_j − [j = target]  (0 where ignored),  dx = dz·w,  dw (+)= dzᵀ·x.
/// These are gradients of the sum of losses over rows, unscaled.
/// x, dx [R, C]; w [Vp, C]; logits [chunk, Vp], memory for one chunk of rows; R need not be a
/// multiple of chunk. targets [R] int32, −1 <= target < V; losses fp32 [R]. dx may not alias x.
struct HeadLoss {
    Tensor x, w, logits;
    int64_t V = 0;
    const int32_t* targets = nullptr;
    float* losses = nullptr;
    Tensor dx = {};
    GradientSink dw = {};
};
void head_loss(Stream& stream, const HeadLoss& args);

/// logits[r, 0..V) = x·wᵀ in fp32 for a few rows (sampling). x [R, C], out fp32 [R, V],
/// scratch_logits [R, Vp] of x's dtype.
void head_logits(Stream& stream, Tensor out, Tensor x, Tensor w, Tensor scratch_logits);

/// The two steps inside head_loss, separate so that a vocabulary can be split over ranks. `logits`
/// [R, Vp] holds the columns [first_column, first_column + columns) of the vocabulary, columns <=
/// Vp. softmax_stats: per row (max, Σ exp(z − max), z_target or −∞ if the target is not in these
/// columns), fp32 [R, 3].
void softmax_stats(Stream& stream, Tensor stats, Tensor logits, const int32_t* targets,
                   int64_t first_column, int64_t columns);
/// Turns logits into dz in place from the (combined) stats; padding columns become 0.
void softmax_backward(Stream& stream, Tensor logits, Tensor stats, const int32_t* targets,
                      int64_t first_column, int64_t columns);

/// total (+)= Σ losses[0..n) in double, in an order that does not depend on the thread count.
void accumulate_loss(Stream& stream, double* total, const float* losses, int64_t n,
                     bool accumulate);

/// totals[s] (+)= Σ losses[b, :] over the sequences b of source s, in double, in an order that does
/// not depend on the thread count. Every total is written, including those of sources without
/// sequences.
struct LossBySource {
    double* totals = nullptr;  // [sources]
    int sources = 0;
    const float* losses = nullptr;       // [B, T]
    const int32_t* source_of = nullptr;  // [B], 0 <= source < sources
    int64_t B = 0, T = 0;
    bool accumulate = false;
};
void accumulate_loss_by_source(Stream& stream, const LossBySource& args);

size_t head_loss_scratch_bytes(const Stream& stream, DType dtype, int64_t chunk, int64_t Vp,
                               int64_t C);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const HeadLoss& args);

namespace cuda {  // head_loss.cu
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
}  // namespace cuda

}  // namespace train_gpt
