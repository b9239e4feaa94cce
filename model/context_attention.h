// Causal attention of context-parallel ranks (parallel/axes/context_group.h): keys and values of all
// ranks are gathered in order of position, and each of the rank's two chunks of queries attends to
// those up to its end. Few key heads make what is gathered small.
#pragma once
#include "device/device.h"
#include "device/memory.h"
#include "kernels/attention/attention.h"
#include "parallel/axes/context_group.h"

namespace train_gpt {

class ContextAttention {
  public:
    /// Takes what all layers share. shape: of the rank's rows, B sequences of T = S tokens, which are
    /// its part of T · ranks; training: backward() will be called.
    ContextAttention(ContextGroup& group, const AttentionShape& shape, Arena& arena, bool training);

    /// As attention_forward(), with q, k, v and out of the rank's rows [B, T]: in each sequence the
    /// two chunks. k and v have consecutive heads and rows at equal distances. shape.doc_start [2, B,
    /// T / 2] and lse [2, B, H, T / 2] are of the chunks.
    void forward(Stream& stream, const AttentionForward& args);
    /// As attention_backward(), of the same; dk and dv are the sums over the queries of all ranks:
    /// on each rank those of the late chunk, then of the early one, then by rank, in fp32, and rounded
    /// once. gathered: the last forward pass had the same k and v, which are still here.
    void backward(Stream& stream, const AttentionBackward& args, bool gathered);

    size_t scratch_bytes(const Stream& stream, const AttentionShape& shape) const;

  private:
    int whole_T() const { return shape_.T * group_.size(); }
    int chunk_length() const { return shape_.T / 2; }
    /// Elements of a token's keys and values.
    int64_t width() const { return int64_t{2} * shape_.H_kv * shape_.D; }
    int64_t elements() const { return int64_t{shape_.B} * whole_T() * width(); }
    AttentionShape chunk_shape(const AttentionShape& shape, int chunk) const;
    HeadsView chunk_of(HeadsView rows, int chunk) const;
    const float* chunk_of(const float* lse, int chunk) const;
    /// Keys, or values, in a tensor that is in order of position.
    HeadsView heads(const Tensor& in_order, bool values) const;
    /// Copies between a tensor in order of position and one with the ranks' rows, by rank.
    void reorder(Stream& stream, Tensor to, Tensor from, bool into_order) const;
    void gather(Stream& stream, const HeadsView& k, const HeadsView& v);

    ContextGroup& group_;
    AttentionShape shape_;
    // In order of position [B, T · ranks, width()]: keys and values; their gradients in fp32. By rank
    // [ranks, B, T, width()]: what travels of either.
    Tensor keys_values_, gradients_, travelling_;
};

/// The bytes that each rank sends for a micro-batch in a layer, as Communicator counts them: of keys
/// and values of B sequences of T tokens on all ranks, n = B·T·2·H_kv·D elements of s bytes between c
/// ranks, 2·s·n·(c−1)/c for the forward and the backward pass (or once more in recomputation instead
/// of the latter), and 4·n·(c−1)/c for gradients.
int64_t context_bytes_sent(int64_t elements, DType dtype, int ranks);

}  // namespace train_gpt
