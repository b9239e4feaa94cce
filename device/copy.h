// Copies, on a device and between it and the host.
#pragma once
#include <cstddef>
#include <cstdint>

#include "device/device.h"

namespace train_gpt {

/// Copies `rows` rows of row_bytes each; rows start to_stride and from_stride bytes apart. Both on the stream's device. The
/// ranges may not overlap.
void copy_rows(Stream& stream, void* to, size_t to_stride, const void* from, size_t from_stride,
               size_t row_bytes, int64_t rows);

/// Copies bytes in the order of the stream's work; each address on the host (planned with Purpose::staging, so that the
/// copy does not hold the host up) or on the stream's device.
void copy(Stream& stream, void* to, const void* from, size_t bytes);

/// The same at once, behind all work on the device, and with any host memory: for setting up and saving, not for steps.
void copy_now(const Device& device, void* to, const void* from, size_t bytes);

/// Zeroes device memory.
void clear(Stream& stream, void* memory, size_t bytes);

namespace cuda {  // copy.cu
void copy_rows(Stream& stream, void* to, size_t to_stride, const void* from, size_t from_stride,
               size_t row_bytes, int64_t rows);
void copy(Stream& stream, void* to, const void* from, size_t bytes);
void copy_now(const Device& device, void* to, const void* from, size_t bytes);
void clear(Stream& stream, void* memory, size_t bytes);
}  // namespace cuda

}  // namespace train_gpt
