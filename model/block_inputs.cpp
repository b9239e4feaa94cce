#include "model/block_inputs.h"

#include <algorithm>

#include "device/copy.h"
#include "device/trace.h"

namespace train_gpt {

BlockInputs::BlockInputs(Arena& arena, const BlockInputsShape& shape)
    : shape_(shape),
      in_(arena.device(), arena.is_counting() || !shape.on_host),
      out_(arena.device(), arena.is_counting() || !shape.on_host) {
    const auto take = [&] {
        return arena.tensor(shape.dtype, {shape.rows, shape.channels}, Purpose::activations);
    };
    const size_t all = static_cast<size_t>(shape.slots) * static_cast<size_t>(shape.layers);
    if (!shape.on_host) {
        for (size_t i = 0; i < all; ++i) inputs_.push_back(take());
        return;
    }
    const auto event = [&] { return arena.is_counting() ? Event() : Event(arena.device()); };
    for (int i = 0; i < std::min(turns, shape.layers); ++i)
        places_.push_back({.memory = take(), .stored = event(), .fetched = event()});
    const size_t bytes = places_[0].memory.bytes();
    for (size_t i = 0; i < all; ++i)
        host_copies_.push_back(
            {.memory = static_cast<std::byte*>(arena.take(bytes, Purpose::offloaded)),
             .stored = event()});
    submitted_ = event();
}

Tensor BlockInputs::at(int slot, int layer) const {
    if (shape_.on_host) return places_[static_cast<size_t>(layer % turns)].memory;
    return inputs_[static_cast<size_t>(slot) * static_cast<size_t>(shape_.layers) +
                   static_cast<size_t>(layer)];
}

void BlockInputs::make_room(Stream& stream, int slot, int layer) {
    if (!shape_.on_host) return;
    Place& place = this->place(layer);
    place.stored.hold(stream);
    place.slot = slot, place.layer = layer;
}

void BlockInputs::store(Stream& stream, int slot, int layer) {
    if (!shape_.on_host) return;
    submitted_.record(stream);
    submitted_.hold(out_);
    Place& from = place(layer);
    HostCopy& to = host_copy(slot, layer);
    {
        const TraceSpan span(TraceTrack::to_host, out_, "store input", layer);
        copy(out_, to.memory, from.memory.data, from.memory.bytes());
    }
    from.stored.record(out_);
    to.stored.record(out_);
}

void BlockInputs::bring(Stream& stream, int slot, int layer) {
    Place& to = place(layer);
    if (to.slot == slot && to.layer == layer) return;
    // What was there has been read by the work of the stream so far, and stored.
    submitted_.record(stream);
    submitted_.hold(in_);
    to.stored.hold(in_);
    const HostCopy& from = host_copy(slot, layer);
    from.stored.hold(in_);
    {
        const TraceSpan span(TraceTrack::from_host, in_, "fetch input", layer);
        copy(in_, to.memory.data, from.memory, to.memory.bytes());
    }
    to.fetched.record(in_);
    to.slot = slot, to.layer = layer;
}

void BlockInputs::prefetch(Stream& stream, int slot, int layer) {
    if (shape_.on_host && layer >= 0) bring(stream, slot, layer);
}

void BlockInputs::fetch(Stream& stream, int slot, int layer) {
    if (!shape_.on_host) return;
    bring(stream, slot, layer);
    place(layer).fetched.hold(stream);
}

}  // namespace train_gpt
