// Token batches on their way from the loader to the device.
#pragma once
#include "dataloader/loader.h"
#include "device/device.h"
#include "device/memory.h"
#include "model/gpt.h"

namespace train_gpt {

/// On CUDA batches are copied by a stream of their own while the device computes on the batch before; on the CPU they are
/// used where the loader made them.
class BatchFeed {
  public:
    /// Takes device memory for two batches of [B, T].
    BatchFeed(Arena& arena, int B, int T, bool document_mask);

    /// The loader's next batch, for work submitted to `compute` until the next call.
    TokenBatch next(Stream& compute, TrainLoader& loader);
    /// Targets of each batch: all of them, since training windows are whole.
    int64_t targets() const { return int64_t{B_} * T_; }
    /// The source of each sample of the batch that next() gave last, [B] in the device's memory.
    const int32_t* sources() const { return sources_; }

  private:
    static constexpr int slots = 2;
    struct Slot {
        Tensor tokens, targets, doc_start, sources;
        Event copied, used;
    };

    int B_, T_;
    bool document_mask_;
    const int32_t* sources_ = nullptr;
    Stream copies_;
    Slot slots_[slots];
    int current_ = 0;
};

}  // namespace train_gpt
