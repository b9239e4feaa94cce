// The head of a language model as one operation: final linear layer, softmax and cross-entropy, in
// chunks of rows. The full logits [B·T, V] never have to exist; a chunk's logits are turned into
// their gradient in place.
#pragma once
#include <functional>

#include "base/tensor.h"
#include "device/stream.h"

namespace train_gpt {

/// With z = x·wᵀ, or softcap·tanh(x·wᵀ / softcap) if softcap is not 0 (row r, vocabulary entries
/// j < V; entries V <= j < Vp are padding and count as −∞):
///   losses[r] = log Σ_j exp z_rj − z_r,target    (nats; 0 where target is −1, which is ignored)
/// and, when dx is given,
///   dz_rj = (1 + 2·z_loss·lse_r)·softmax(z_r)_j − [j = target]  (0 where ignored),
///   dz_rj ·= 1 − (z_rj / softcap)²                               (if softcap is not 0),
///   dx = dz·w,  dw (+)= dzᵀ·x,  with lse_r = log Σ_j exp z_rj.
/// These are gradients of the sum over rows of losses[r] + z_loss·lse_r², unscaled. The second term
/// is the z-loss (Chowdhery et al. 2022, arXiv 2204.02311), which keeps the logits near zero.
/// losses do not include it.
///
/// x, dx [R, C]; w [Vp, C]; logits [chunk, Vp], memory for one chunk of rows; R need not be a
/// multiple of chunk. targets [R] int32, −1 <= target < V; losses fp32 [R]. dx may not alias x.
///
/// w may hold a part of the vocabulary: V entries that begin with first_column. Then `combine` gets
/// the statistics of a chunk's rows over this part (see softmax_stats), and turns them into the
/// statistics over the whole vocabulary, as later work of the stream. It is called once for each
/// chunk, in order. losses are over the whole vocabulary. dw belongs to the part. dx is the part's
/// share of the gradient; the caller adds up the shares.
struct HeadLoss {
    Tensor x, w, logits;
    int64_t V = 0;
    const int32_t* targets = nullptr;
    float* losses = nullptr;
    Tensor dx = {};
    GradientSink dw = {};
    float z_loss = 0;
    float softcap = 0;
    int64_t first_column = 0;
    Tensor stats = {};  // fp32 [chunk, 3]; needed with combine
    std::function<void(Stream& stream, Tensor stats)> combine = {};
};
void head_loss(Stream& stream, const HeadLoss& args);

/// out[r, 0..V) = z of HeadLoss in fp32 for a few rows (sampling). x [R, C], out fp32 [R, V],
/// w [Vp, C], logits [R, Vp] of x's dtype: memory.
struct HeadLogits {
    Tensor out, x, w, logits;
    float softcap = 0;
};
void head_logits(Stream& stream, const HeadLogits& args);

/// The steps of a head_loss whose vocabulary is split. `logits` [R, Vp] holds x·wᵀ for the columns
/// [first_column, first_column + columns) of the vocabulary, columns <= Vp. softmax_stats: per row
/// (max, Σ exp(z − max), z_target or −∞ if the target is not in these columns), fp32 [R, 3].
struct SoftmaxStats {
    Tensor stats, logits;
    const int32_t* targets = nullptr;
    int64_t first_column = 0, columns = 0;
    float softcap = 0;
};
void softmax_stats(Stream& stream, const SoftmaxStats& args);
/// Adds up the statistics of the parts of a vocabulary, of_parts [parts, R, 3], in the order of the
/// parts. stats [R, 3] receives the statistics of the whole vocabulary, and may be one of the
/// parts.
void combine_softmax_stats(Stream& stream, Tensor stats, Tensor of_parts);
/// losses[r] from combined stats [R, 3].
void losses_of_stats(Stream& stream, float* losses, Tensor stats, const int32_t* targets);
/// Turns logits into dz in place from the combined stats; padding columns become 0.
struct SoftmaxBackward {
    Tensor logits, stats;
    const int32_t* targets = nullptr;
    int64_t first_column = 0, columns = 0;
    float z_loss = 0;
    float softcap = 0;
};
void softmax_backward(Stream& stream, const SoftmaxBackward& args);

/// ⌊2^20·x⌉ / 2^20. Sums of such numbers are exact, and so the same in any order, below 2^33.
double rounded_loss(double x);
/// total (+)= Σ losses[0..n) in double, in an order that does not depend on the thread count. If
/// `exact`, a call's sum is rounded by rounded_loss() before it is added.
void accumulate_loss(Stream& stream, double* total, const float* losses, int64_t n, bool accumulate,
                     bool exact = false);

/// totals[s] (+)= Σ losses[b, :] over the sequences b of source s, in double, in an order that does
/// not depend on the thread count. Every total is written, even if its source has no sequences.
struct LossBySource {
    double* totals = nullptr;  // [sources]
    int sources = 0;
    const float* losses = nullptr;       // [B, T]
    const int32_t* source_of = nullptr;  // [B], 0 <= source < sources
    int64_t B = 0, T = 0;
    bool accumulate = false, exact = false;
};
void accumulate_loss_by_source(Stream& stream, const LossBySource& args);

size_t head_loss_scratch_bytes(const Stream& stream, DType dtype, int64_t chunk, int64_t Vp,
                               int64_t C);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const HeadLoss& args);

namespace cuda {  // head_loss.cu
void head_loss(Stream& stream, const HeadLoss& args);
void head_logits(Stream& stream, const HeadLogits& args);
void softmax_stats(Stream& stream, const SoftmaxStats& args);
void combine_softmax_stats(Stream& stream, Tensor stats, Tensor of_parts);
void losses_of_stats(Stream& stream, float* losses, Tensor stats, const int32_t* targets);
void softmax_backward(Stream& stream, const SoftmaxBackward& args);
void accumulate_loss(Stream& stream, double* total, const float* losses, int64_t n, bool accumulate,
                     bool exact);
void accumulate_loss_by_source(Stream& stream, const LossBySource& args);
size_t head_loss_scratch_bytes(DType dtype, int64_t chunk, int64_t Vp, int64_t C);
}  // namespace cuda

}  // namespace train_gpt
