// Token batches on their way from the loader to the device.
#pragma once
#include "dataloader/loader.h"
#include "device/device.h"
#include "device/memory.h"
#include "model/stage.h"

namespace train_gpt {

/// On CUDA a separate stream copies each batch while the device computes on the one before. On the
/// CPU batches are used where the loader made them.
class BatchFeed {
  public:
    /// Takes device memory for two batches of [B, T], or of a context-parallel rank's part of them.
    BatchFeed(Arena& arena, int B, int T, bool document_mask, const ContextRank& context = {});

    /// The loader's next batch, for work submitted to `compute` until the next call.
    TokenBatch next(Stream& compute, TrainLoader& loader);
    /// The number of this rank's targets of each batch: all of them, since training windows are
    /// complete.
    int64_t targets() const { return targets_; }
    /// The source of each sample of the batch that next() returned last, [B] in the device's
    /// memory.
    const int32_t* sources() const { return sources_; }

  private:
    static constexpr int slots = 2;
    struct Slot {
        Tensor tokens, targets, doc_start, sources;
        SequencePart part;  // of context-parallel ranks, instead of the first three
        Event copied, used;
    };

    int64_t targets_;
    bool document_mask_;
    const int32_t* sources_ = nullptr;
    Stream copies_;
    Slot slots_[slots];
    int current_ = 0;
};

}  // namespace train_gpt
