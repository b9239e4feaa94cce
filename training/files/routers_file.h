// What the routers of a mixture did in a checkpoint's last step: routers.json. A balance loss over
// steps follows from it.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace train_gpt {

/// Writes the counts of the last step [routers, E] (RouterCounts) into a checkpoint's folder.
/// Returns the file's name.
std::string write_routers(const std::filesystem::path& checkpoint, int n_expert,
                          const std::vector<int32_t>& chosen);

/// Reads these counts from a checkpoint's folder; zeros if the checkpoint has none. Throws Error if
/// there are not `n` counts.
std::vector<int32_t> read_routers(const std::filesystem::path& checkpoint, size_t n);

}  // namespace train_gpt
