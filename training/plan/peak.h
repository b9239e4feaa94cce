// Measures the device's peak rates. The speed of a step is compared with them.
#pragma once
#include "base/dtype.h"
#include "device/device.h"
#include "device/stream.h"

namespace train_gpt {

/// FLOP/s (2·M·N·K per product) of the fastest of several large matrix products in this dtype
/// through linear_forward. Takes 0.25 to 2 seconds, and up to twice that on a GPU.
double measure_peak_flops(const Device& device, DType dtype, const KernelSettings& settings = {});

/// Bytes per second in each direction between a GPU and this host's pinned memory, while copies run
/// in both. Takes a few milliseconds, and 2 · 64 MiB of either memory.
double measure_host_link(const Device& device);

/// Bytes per second, reads plus writes, of a copy that is too large for any cache. Takes a fraction
/// of a second.
double measure_bandwidth(const Device& device);

}  // namespace train_gpt
