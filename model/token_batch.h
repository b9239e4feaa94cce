// A micro-batch's tokens: what a model reads of them, and their way from the host to the device.
#pragma once
#include <cstdint>

#include "base/tensor.h"
#include "device/memory.h"
#include "device/stream.h"
#include "parallel/axes/context.h"

namespace train_gpt {

/// Token ids of a micro-batch, each [B, T]; target −1 is ignored.
struct TokenBatch {
    const int32_t *tokens = nullptr, *targets = nullptr,
                  *doc_start = nullptr;  // doc_start null: no document masks
    /// Only context-parallel ranks have it. A rank has [B, T / ranks] of each member: its token
    /// (b, t) is at position t − position_start[b, t] of its document. doc_start is then
    /// [2, B, T / 2·ranks], by chunk, in positions of the whole sequence.
    const int32_t* position_start = nullptr;
    /// [B]: the source of training data of each sequence; null if losses are not split by source.
    const int32_t* sources = nullptr;
    /// In training: products are in fp8 where a run asks for it (fp8_scales.h), and experts take no
    /// more routes than their capacity (ExpertSpec::capacity).
    bool trains = false;

    /// What embeddings and rotations take.
    const int32_t* starts_of_positions() const {
        return position_start ? position_start : doc_start;
    }
};

/// The batches that a model takes: B whole sequences of T tokens.
struct BatchShape {
    int B = 0, T = 0;
    bool document_mask = false;
    ContextRank context = {};

    int64_t tokens() const { return int64_t{B} * T; }
    int64_t tokens_of_rank() const { return tokens() / context.ranks; }
};

/// Memory of the model's device for one batch after the other.
class DeviceBatch {
  public:
    struct Options {
        bool has_targets = true, has_sources = false;
        /// Whether the model still uses a batch after its memory on the host has changed.
        bool outlives_host = false;
    };
    DeviceBatch() = default;
    /// On a CPU, whole batches are used where the host has them and take no memory, unless the
    /// model still uses a batch after that memory has changed. If ranks share sequences, 2·ranks
    /// must divide T.
    DeviceBatch(Arena& arena, const BatchShape& shape, const Options& options);

    /// Submits the copy of a batch in the host's memory, of which a context-parallel rank picks its
    /// part, and returns where the model finds it. `whole` has what the shape and the options say.
    /// The copy of the batch before must have ended.
    TokenBatch upload(Stream& stream, const TokenBatch& whole) const;

    /// whole [B, T] from parts [ranks, B, T / ranks].
    void put_together(float* whole, const float* parts) const;

  private:
    struct Members {
        Tensor tokens, targets, doc_start, position_start;  // [tokens_of_rank()]
    };
    template <class Work>
    void for_each_chunk(int rank, const Work& work) const;
    TokenBatch part_of(const TokenBatch& whole) const;

    BatchShape shape_;
    Members part_;    // of context-parallel ranks, in the host's memory
    Members device_;  // on a CPU the same as part_
    Tensor sources_;
};

}  // namespace train_gpt
