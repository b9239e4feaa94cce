// Causal attention of context-parallel ranks (parallel/axes/context.h). Each rank gathers the
// keys and values of all ranks, in order of position. A rank has two chunks of queries. Each chunk
// attends to the keys up to the chunk's end. Few key heads make the gathered tensors small.
#pragma once
#include "device/memory.h"
#include "device/stream.h"
#include "kernels/attention/attention.h"
#include "parallel/axes/context.h"

namespace train_gpt {

class ContextAttention {
  public:
    /// Takes memory that all layers share. widest: the shape of the layer with the widest keys. It
    /// has the rank's rows, which are B sequences of T = S tokens. Whole sequences have T · ranks
    /// tokens. training: backward() will be called.
    ContextAttention(ContextGroup& group, const AttentionShape& widest, Arena& arena,
                     bool training);

    /// Like attention_forward(). q, k, v and out are the rank's rows [B, T]; each sequence has the
    /// early chunk, then the late chunk. The heads of k and v are consecutive, and their rows have
    /// equal distances. shape.doc_start [2, B, T / 2] and lse [2, B, H, T / 2] are chunk by chunk.
    void forward(Stream& stream, const AttentionForward& args);
    /// Like attention_backward(), for the same rows. dk and dv are sums over the queries of all
    /// ranks, added in fp32 and rounded once. dsinks are of the rank's queries alone. Each rank
    /// adds the sum over its late chunk and the sum over its early chunk. Then the ranks' sums are
    /// added, in the order of ranks. gathered: the last forward pass had the same k and v, so they
    /// need not be gathered again.
    void backward(Stream& stream, const AttentionBackward& args, bool gathered);

    size_t scratch_bytes(const Stream& stream, const AttentionShape& shape) const;

  private:
    int whole_T() const { return shape_.T * group_.size(); }
    int chunk_length() const { return shape_.T / 2; }
    /// The number of elements in a token's keys and values.
    int64_t width() const { return int64_t{2} * shape_.H_kv * shape_.D; }
    int64_t elements() const { return int64_t{shape_.B} * whole_T() * width(); }
    void work_on(const AttentionShape& layer);
    AttentionShape chunk_shape(const AttentionShape& shape, int chunk) const;
    HeadsView chunk_of(HeadsView rows, int chunk) const;
    const float* chunk_of(const float* lse, int chunk) const;
    /// The keys (or the values) in a tensor that is in order of position.
    HeadsView heads(const Tensor& in_order, bool values) const;
    /// Copies from a tensor with the ranks' rows, by rank, into a tensor in order of position, or
    /// back.
    void reorder(Stream& stream, Tensor to, Tensor from, bool into_order) const;
    void gather(Stream& stream, const HeadsView& k, const HeadsView& v);

    ContextGroup& group_;
    AttentionShape shape_;  // of the layer at work
    int64_t most_elements_;
    // keys_values_ and gradients_ (fp32) are in order of position [B, T · ranks, width()].
    // travelling_ is by rank [ranks, B, T, width()]: keys and values, or gradients, as they travel.
    Tensor keys_values_, gradients_, travelling_;
};

}  // namespace train_gpt
