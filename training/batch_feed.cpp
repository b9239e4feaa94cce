#include "training/batch_feed.h"

namespace train_gpt {

BatchFeed::BatchFeed(Arena& arena, const BatchShape& shape, int in_use)
    : document_mask_(shape.document_mask), copies_(arena.device(), arena.is_counting()) {
    const bool is_cuda = arena.device().is_cuda();
    slots_.resize(static_cast<size_t>(in_use) + (is_cuda ? 1 : 0));
    for (Slot& slot : slots_) {
        slot.batch = DeviceBatch(arena, shape, {.has_sources = true, .outlives_host = in_use > 1});
        if (!is_cuda || arena.is_counting()) continue;
        slot.copied = Event(arena.device());
        slot.used = Event(arena.device());
    }
}

TokenBatch BatchFeed::next(Stream& compute, TrainLoader& loader) {
    // From now on the loader may overwrite its batch. This feed may overwrite the device's copy of
    // the batch that is no longer in use; the next batch but one goes there.
    slots_[current_].copied.wait();
    slots_[(current_ + 2) % slots_.size()].used.record(compute);
    const HostBatch& host = loader.next();

    current_ = (current_ + 1) % slots_.size();
    Slot& slot = slots_[current_];
    slot.used.hold(copies_);
    const TokenBatch batch =
        slot.batch.upload(copies_, {.tokens = host.tokens.data(),
                                    .targets = host.targets.data(),
                                    .doc_start = document_mask_ ? host.doc_start.data() : nullptr,
                                    .sources = host.sources.data()});
    slot.copied.record(copies_);
    slot.copied.hold(compute);
    return batch;
}

}  // namespace train_gpt
