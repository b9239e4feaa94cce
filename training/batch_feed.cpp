#include "training/batch_feed.h"

#include "device/copy.h"

namespace train_gpt {

BatchFeed::BatchFeed(Arena& arena, int B, int T, bool document_mask, const ContextRank& context,
                     int in_use)
    : targets_(int64_t{B} * T / context.ranks),
      document_mask_(document_mask),
      copies_(arena.device(), arena.is_counting()) {
    const bool is_cuda = arena.device().is_cuda();
    if (!is_cuda && !context.is_split() && in_use == 1) return;
    slots_.resize(static_cast<size_t>(in_use) + (is_cuda ? 1 : 0));
    for (Slot& slot : slots_) {
        slot.part = SequencePart(arena, context, B, T, document_mask);
        const auto take = [&](std::initializer_list<int64_t> shape) {
            return arena.tensor(DType::int32, shape, Purpose::buffers);
        };
        if (!slot.part) {
            slot.tokens = take({B, T});
            slot.targets = take({B, T});
            if (document_mask) slot.doc_start = take({B, T});
        }
        slot.sources = take({B});
        if (!is_cuda || arena.is_counting()) continue;
        slot.copied = Event(arena.device());
        slot.used = Event(arena.device());
    }
}

FedBatch BatchFeed::in(const Slot& slot) const {
    return {.batch = slot.part
                         ? slot.part.on_device()
                         : TokenBatch{.tokens = slot.tokens.as<int32_t>(),
                                      .targets = slot.targets.as<int32_t>(),
                                      .doc_start =
                                          document_mask_ ? slot.doc_start.as<int32_t>() : nullptr},
            .sources = slot.sources.as<int32_t>()};
}

FedBatch BatchFeed::next(Stream& compute, TrainLoader& loader) {
    const auto on_host = [&](const HostBatch& host) {
        return TokenBatch{.tokens = host.tokens.data(),
                          .targets = host.targets.data(),
                          .doc_start = document_mask_ ? host.doc_start.data() : nullptr};
    };
    if (slots_.empty()) {
        const HostBatch& host = loader.next();
        return {.batch = on_host(host), .sources = host.sources.data()};
    }
    // From now on the loader may overwrite its batch, and this feed the device's copy of the one that
    // is not in use any more, which comes after the next one.
    slots_[current_].copied.wait();
    slots_[(current_ + 2) % slots_.size()].used.record(compute);
    const HostBatch& host = loader.next();
    const TokenBatch whole = on_host(host);

    current_ = (current_ + 1) % slots_.size();
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
    return in(slot);
}

}  // namespace train_gpt
