#include "device/copy.h"

#include <cstring>

namespace train_gpt {

void copy_rows(Stream& stream, const RowCopy& c) {
    TRAIN_GPT_ON_CUDA(stream.device, copy_rows(stream, c));
    for (size_t r = 0; r < static_cast<size_t>(c.rows); ++r)
        std::memcpy(static_cast<char*>(c.to) + r * c.to_stride,
                    static_cast<const char*>(c.from) + r * c.from_stride, c.row_bytes);
}

void copy(Stream& stream, void* to, const void* from, size_t bytes) {
    TRAIN_GPT_ON_CUDA(stream.device, copy(stream, to, from, bytes));
    std::memcpy(to, from, bytes);
}

void copy_now(const Device& device, void* to, const void* from, size_t bytes) {
    TRAIN_GPT_ON_CUDA(device, copy_now(device, to, from, bytes));
    std::memcpy(to, from, bytes);
}

void clear(Stream& stream, void* memory, size_t bytes) {
    TRAIN_GPT_ON_CUDA(stream.device, clear(stream, memory, bytes));
    std::memset(memory, 0, bytes);
}

}  // namespace train_gpt
