// Measures the device's peak rates. The speed of a step is compared with them.
#pragma once
#include "base/dtype.h"
#include "device/device.h"
#include "device/stream.h"
#include "training/plan/cluster.h"

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

/// What a step's products and attention reach of `peak`, which measure_peak_flops() gives for the
/// dtype. The measured products belong to MLPs of 160, 320 and 768 columns and 4,096 tokens,
/// forward and backward, with bias and GELU. A least-squares fit gives `products` and `half_size`:
///
///   2·M·N·K / (seconds · peak)   =   products / (1 + half_size / (4·min(N, K)))
///
/// Attention has 1,024 tokens and heads of 64, and `attention` is what would be reached without
/// `tile` (Efficiencies). Medians; takes about three seconds.
ReachedShares measure_shares(const Device& device, DType dtype, double peak, double tile);

}  // namespace train_gpt
