#include "training/batch_feed.h"

#include "kernels/copy.h"

namespace train_gpt {

BatchFeed::BatchFeed(Arena& arena, int B, int T)
    : B_(B), T_(T), copies_(arena.device(), arena.is_counting()) {
    if (!arena.device().is_cuda()) return;
    for (Slot& slot : slots_) {
        for (Tensor Slot::*member : {&Slot::tokens, &Slot::targets})
            slot.*member = arena.tensor(DType::int32, {B, T}, Purpose::buffers);
        if (arena.is_counting()) continue;
        slot.copied = Event(arena.device());
        slot.used = Event(arena.device());
    }
}

TokenBatch BatchFeed::next(Stream& compute, TrainLoader& loader) {
    // The loader may write over its batch from now on, and this feed over the device's copy of the batch before it.
    slots_[current_].copied.wait();
    slots_[current_].used.record(compute);
    const HostBatch& host = loader.next();
    if (!compute.device.is_cuda())
        return {.tokens = host.tokens.data(), .targets = host.targets.data()};

    current_ = (current_ + 1) % slots;
    Slot& slot = slots_[current_];
    slot.used.hold(copies_);
    copy(copies_, slot.tokens.data, host.tokens.data(), host.tokens.size_bytes());
    copy(copies_, slot.targets.data, host.targets.data(), host.targets.size_bytes());
    slot.copied.record(copies_);
    slot.copied.hold(compute);
    return {.tokens = slot.tokens.as<int32_t>(), .targets = slot.targets.as<int32_t>()};
}

}  // namespace train_gpt
