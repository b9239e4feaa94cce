// What the device reaches at best, measured: the number that a step's speed is printed beside.
#pragma once
#include "base/dtype.h"
#include "device/device.h"

namespace train_gpt {

/// FLOP/s (2·M·N·K per product) of the fastest of several large matrix products in this dtype through linear_forward.
/// Takes a quarter of a second to two seconds.
double measure_peak_flops(const Device& device, DType dtype);

/// Bytes per second, read and written, of a copy that no cache holds. Takes a fraction of a second.
double measure_bandwidth(const Device& device);

}  // namespace train_gpt
