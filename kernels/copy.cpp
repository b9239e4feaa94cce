#include "kernels/copy.h"

#include <cstring>

namespace train_gpt {

void copy_rows(Stream&, void* to, size_t to_stride, const void* from, size_t from_stride, size_t row_bytes,
               int64_t rows) {
    for (int64_t r = 0; r < rows; ++r)
        std::memcpy(static_cast<char*>(to) + static_cast<size_t>(r) * to_stride,
                    static_cast<const char*>(from) + static_cast<size_t>(r) * from_stride, row_bytes);
}

}  // namespace train_gpt
