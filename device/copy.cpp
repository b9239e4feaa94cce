#include "device/copy.h"

#include <cstring>

namespace train_gpt {

void copy_rows(Stream& stream, void* to, size_t to_stride, const void* from, size_t from_stride,
               size_t row_bytes, int64_t rows) {
    TRAIN_GPT_ON_CUDA(stream.device,
                      copy_rows(stream, to, to_stride, from, from_stride, row_bytes, rows));
    for (int64_t r = 0; r < rows; ++r)
        std::memcpy(static_cast<char*>(to) + static_cast<size_t>(r) * to_stride,
                    static_cast<const char*>(from) + static_cast<size_t>(r) * from_stride,
                    row_bytes);
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
