#include "training/batch_feed.h"

#include "device/copy.h"

namespace train_gpt {

BatchFeed::BatchFeed(Arena& arena, int B, int T, bool document_mask, const ContextRank& context)
    : targets_(int64_t{B} * T / context.ranks),
      document_mask_(document_mask),
      copies_(arena.device(), arena.is_counting()) {
    for (Slot& slot : slots_) {
        slot.part = SequencePart(arena, context, B, T, document_mask);
        if (!arena.device().is_cuda()) return;  // the first one is enough
        const auto take = [&](std::initializer_list<int64_t> shape) {
            return arena.tensor(DType::int32, shape, Purpose::buffers);
        };
        if (!slot.part) {
            slot.tokens = take({B, T});
            slot.targets = take({B, T});
            if (document_mask) slot.doc_start = take({B, T});
        }
        slot.sources = take({B});
        if (arena.is_counting()) continue;
        slot.copied = Event(arena.device());
        slot.used = Event(arena.device());
    }
}

TokenBatch BatchFeed::next(Stream& compute, TrainLoader& loader) {
    // From now on the loader may overwrite its batch, and this feed the device's copy of the
    // previous one.
    slots_[current_].copied.wait();
    slots_[current_].used.record(compute);
    const HostBatch& host = loader.next();
    const TokenBatch whole{.tokens = host.tokens.data(),
                           .targets = host.targets.data(),
                           .doc_start = document_mask_ ? host.doc_start.data() : nullptr};
    if (!compute.device.is_cuda()) {
        sources_ = host.sources.data();
        const SequencePart& part = slots_[0].part;
        if (!part) return whole;
        part.upload(compute, whole);
        return part.on_device();
    }

    current_ = (current_ + 1) % slots;
    Slot& slot = slots_[current_];
    slot.used.hold(copies_);
    const auto upload = [&](const Tensor& to, std::span<const int32_t> from) {
        copy(copies_, to.data, from.data(), from.size_bytes());
    };
    if (slot.part) {
        slot.part.upload(copies_, whole);
    } else {
        upload(slot.tokens, host.tokens);
        upload(slot.targets, host.targets);
        if (document_mask_) upload(slot.doc_start, host.doc_start);
    }
    upload(slot.sources, host.sources);
    slot.copied.record(copies_);
    slot.copied.hold(compute);
    sources_ = slot.sources.as<int32_t>();
    if (slot.part) return slot.part.on_device();
    return {.tokens = slot.tokens.as<int32_t>(),
            .targets = slot.targets.as<int32_t>(),
            .doc_start = document_mask_ ? slot.doc_start.as<int32_t>() : nullptr};
}

}  // namespace train_gpt
