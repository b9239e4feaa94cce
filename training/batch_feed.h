// Token batches on their way from the loader to the device.
#pragma once
#include <vector>

#include "dataloader/loader.h"
#include "device/memory.h"
#include "device/stream.h"
#include "model/token_batch.h"

namespace train_gpt {

/// On CUDA a separate stream copies each batch while the device computes on the one before. On the
/// CPU batches are used where the loader made them, unless several are in use at the same time.
class BatchFeed {
  public:
    /// in_use: how many batches are in use at the same time. Takes memory for one more on CUDA, and
    /// on the CPU for as many, or for none if one whole batch at a time is in use.
    BatchFeed(Arena& arena, const BatchShape& shape, int in_use);

    /// The loader's next batch, for work submitted to `compute` until `in_use` more have followed.
    TokenBatch next(Stream& compute, TrainLoader& loader);

  private:
    struct Slot {
        DeviceBatch batch;
        Event copied, used;
    };

    bool document_mask_;
    Stream copies_;
    std::vector<Slot> slots_;
    size_t current_ = 0;
};

}  // namespace train_gpt
