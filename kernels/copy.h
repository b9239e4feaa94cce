// Copies on a device.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/device.h"

namespace train_gpt {

/// Copies `rows` rows of row_bytes each; rows start to_stride and from_stride bytes apart. The ranges may not overlap.
void copy_rows(Stream& stream, void* to, size_t to_stride, const void* from, size_t from_stride, size_t row_bytes,
               int64_t rows);

}  // namespace train_gpt
