// The inputs of blocks, the residual stream at their borders, which a training pass keeps from the
// forward to the backward pass. They stay on the device; or they go to host memory while the next
// block computes, and come back ahead of the backward pass.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/memory.h"
#include "device/stream.h"

namespace train_gpt {

struct BlockInputsShape {
    int slots = 1, layers = 1;  // micro-batches whose inputs are held at the same time
    DType dtype = DType::fp32;
    int64_t rows = 0, channels = 0;
    bool on_host = false;
};

class BlockInputs {
  public:
    BlockInputs(Arena& arena, const BlockInputsShape& shape);

    /// Where layer l of a slot finds its input [rows, channels] on the device. On the host: layers
    /// take turns in three places.
    Tensor at(int slot, int layer) const;

    // With on_host; else these do nothing. A forward pass calls make_room() for a layer before its
    // input is written, and store() after the layer's forward pass. A backward pass calls fetch()
    // before it reads the input, and prefetch() for the layers that come next.

    void make_room(Stream& stream, int slot, int layer);
    void store(Stream& stream, int slot, int layer);
    void prefetch(Stream& stream, int slot, int layer);
    void fetch(Stream& stream, int slot, int layer);

    static constexpr int turns = 3;  // layers whose inputs are on the device at a time

    /// How many layers' inputs come back for a backward pass that follows its forward pass at once:
    /// the inputs of the last three are still on the device. After another slot's pass all come
    /// back.
    static int layers_from_host(int layers) { return std::max(layers - turns, 0); }

  private:
    /// One of the places on the device, and the input that is in it.
    struct Place {
        Tensor memory;
        int slot = -1, layer = -1;
        Event stored, fetched;
    };
    struct HostCopy {
        std::byte* memory = nullptr;
        Event stored;
    };

    Place& place(int layer) { return places_[static_cast<size_t>(layer % turns)]; }
    HostCopy& host_copy(int slot, int layer) {
        return host_copies_[static_cast<size_t>(slot) * static_cast<size_t>(shape_.layers) +
                            static_cast<size_t>(layer)];
    }
    void bring(Stream& stream, int slot, int layer);

    BlockInputsShape shape_;
    std::vector<Tensor> inputs_;  // [slots, layers], unless on_host
    std::vector<Place> places_;
    std::vector<HostCopy> host_copies_;
    Stream in_, out_;
    Event submitted_;
};

}  // namespace train_gpt
