// Copies on a device, and between a device and the host.
#pragma once
#include <cstddef>
#include <cstdint>

#include "device/device.h"
#include "device/stream.h"

namespace train_gpt {

/// Rows whose starts are to_stride and from_stride bytes apart. Both ranges are on the stream's
/// device and must not overlap.
struct RowCopy {
    void* to;
    size_t to_stride;
    const void* from;
    size_t from_stride;
    size_t row_bytes;
    int64_t rows;
};
void copy_rows(Stream& stream, const RowCopy& c);

/// Copies bytes in stream order. Each address is on the stream's device or on the host. Host memory
/// should be planned with Purpose::staging, so that the copy does not block the host.
void copy(Stream& stream, void* to, const void* from, size_t bytes);

/// Waits for all work on the device, then copies before it returns. Host memory may be of any
/// kind. For setup and saving, not for steps.
void copy_now(const Device& device, void* to, const void* from, size_t bytes);

/// Zeroes device memory.
void clear(Stream& stream, void* memory, size_t bytes);

namespace cuda {  // copy.cu
void copy_rows(Stream& stream, const RowCopy& c);
void copy(Stream& stream, void* to, const void* from, size_t bytes);
void copy_now(const Device& device, void* to, const void* from, size_t bytes);
void clear(Stream& stream, void* memory, size_t bytes);
}  // namespace cuda

}  // namespace train_gpt
