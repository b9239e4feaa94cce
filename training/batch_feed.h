// Token batches on their way from the loader to the device.
#pragma once
#include <vector>

#include "dataloader/loader.h"
#include "device/device.h"
#include "device/memory.h"
#include "model/stage.h"

namespace train_gpt {

/// A batch, and the source of each of its samples [B], in the device's memory.
struct FedBatch {
    TokenBatch batch;
    const int32_t* sources = nullptr;
};

/// On CUDA a separate stream copies each batch while the device computes on the one before. On the
/// CPU batches are used where the loader made them, unless several are in use at the same time.
class BatchFeed {
  public:
    /// in_use: how many batches are in use at the same time. Takes device memory for one more batch
    /// of [B, T], or of a context-parallel rank's part of it; on the CPU for as many, or for none if
    /// one whole batch at a time is in use.
    BatchFeed(Arena& arena, int B, int T, bool document_mask, const ContextRank& context = {},
              int in_use = 1);

    /// The loader's next batch, for work submitted to `compute` until `in_use` more have followed.
    FedBatch next(Stream& compute, TrainLoader& loader);
    /// The number of this rank's targets of each batch: all of them, since training windows are
    /// complete.
    int64_t targets() const { return targets_; }

  private:
    struct Slot {
        Tensor tokens, targets, doc_start, sources;
        SequencePart part;  // of context-parallel ranks, instead of the first three
        Event copied, used;
    };
    FedBatch in(const Slot& slot) const;

    int64_t targets_;
    bool document_mask_;
    Stream copies_;
    std::vector<Slot> slots_;
    size_t current_ = 0;
};

}  // namespace train_gpt
