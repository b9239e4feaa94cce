// What Git LFS and Hugging Face's cache leave where a user expects a file or the folder of a model,
// recognised so that the error can say what it is.
#pragma once
#include <filesystem>
#include <string_view>

namespace train_gpt {

/// Throws Error if a file that begins with these bytes is a pointer, which Git without LFS leaves
/// in the place of a large file.
void refuse_lfs_pointer(const std::filesystem::path& path, std::string_view beginning);

/// Throws Error if a folder is the root of what Hugging Face's cache holds of one model or data set
/// (blobs, refs, snapshots), or the folder of all these roots. Names a snapshot to use instead.
void refuse_cache_root(const std::filesystem::path& folder);

}  // namespace train_gpt
