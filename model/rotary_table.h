// The table of angles that rotary positions need, on the model's device.
#pragma once
#include "device/memory.h"
#include "device/stream.h"
#include "model/spec.h"

namespace train_gpt {

class RotaryTable {
  public:
    /// If the spec has rotary positions, takes memory for positions 0 … n − 1 from the arena. One
    /// table serves all layers: they have the spec's head size.
    RotaryTable(const DecoderSpec& spec, int64_t n, Arena& arena, Purpose purpose);

    /// The table, fp32 [n, D], for RopeShape::table. The first call computes it and waits for the
    /// device.
    const Tensor& get(Stream& stream);

  private:
    RopeFrequencies frequencies_;
    Tensor table_;
    bool is_filled_ = false;
};

}  // namespace train_gpt
