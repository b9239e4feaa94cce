// Files that are read through a map (MappedFile), without all of them staying in memory.
#pragma once
#include <cstddef>
#include <span>

namespace train_gpt {

/// After this many bytes of a map were read, its pages are worth giving back.
constexpr size_t most_mapped_bytes = 8 << 20;

/// Takes the pages of a read-only map out of this process's memory. They stay in the system's cache
/// of files, from which a later read takes them again.
void release_pages(std::span<const std::byte> map);

}  // namespace train_gpt
