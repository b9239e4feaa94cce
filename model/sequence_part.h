// A context-parallel rank's part of a batch of sequences (parallel/axes/context_group.h).
#pragma once
#include <cstdint>

#include "base/tensor.h"
#include "device/device.h"
#include "device/memory.h"
#include "parallel/axes/context_group.h"

namespace train_gpt {

/// Token ids of a micro-batch on the model's device, each [B, T]; target −1 is ignored.
struct TokenBatch {
    const int32_t *tokens = nullptr, *targets = nullptr,
                  *doc_start = nullptr;  // doc_start null: no document masks
    /// Of context-parallel ranks, who have [B, T / ranks] of each: token (b, t) of the rank is at
    /// position t − position_start[b, t] of its document; and doc_start is [2, B, T / 2·ranks], of
    /// each chunk, in positions of the whole sequence.
    const int32_t* position_start = nullptr;

    /// What embeddings and rotations take.
    const int32_t* starts_of_positions() const {
        return position_start ? position_start : doc_start;
    }
};

/// The part of one batch after the other, in the host's and the device's memory.
class SequencePart {
  public:
    /// Absent: of batches that are not split.
    SequencePart() = default;
    /// Of batches [B, T]; 2·place.ranks divides T.
    SequencePart(Arena& arena, const ContextRank& place, int B, int T, bool document_mask);

    explicit operator bool() const { return place_.is_split(); }
    /// Picks the rank's tokens of a batch in the host's memory, of which targets may be absent, and
    /// submits their copy to the device. The copy of the batch before must have ended.
    void upload(Stream& stream, const TokenBatch& whole) const;
    /// Where it copies them.
    TokenBatch on_device() const { return at(on_device_); }

    /// whole [B, T] from parts [ranks, B, T / ranks].
    static void put_together(float* whole, const float* parts, int ranks, int B, int T);

  private:
    int64_t tokens() const { return int64_t{B_} * T_ / place_.ranks; }
    TokenBatch at(const Tensor& memory) const;

    ContextRank place_;
    int B_ = 0, T_ = 0;
    bool document_mask_ = false;
    // tokens, targets, starts of positions, and starts of documents with a mask: [3 or 4, tokens()]
    Tensor on_host_, on_device_;
};

}  // namespace train_gpt
