#include "base/mapped_pages.h"

#include <cstdint>

#include <sys/mman.h>
#include <unistd.h>

namespace train_gpt {

void release_pages(std::span<const std::byte> map) {
    if (map.empty()) return;
    const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    const auto at = reinterpret_cast<uintptr_t>(map.data()), begin = at / page * page;
    ::madvise(reinterpret_cast<void*>(begin), at + map.size() - begin, MADV_DONTNEED);
}

}  // namespace train_gpt
