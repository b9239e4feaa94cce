// How two files differ, in words, for tests.
#pragma once
#include <filesystem>
#include <string>

namespace train_gpt {

/// Empty when both files exist and have the same bytes. Else a sentence: for two .safetensors, the
/// first tensor that differs, where, and in how many elements; for other files, the first byte. In
/// a test:
///     CHECK(file_difference(ours, theirs) == "");
std::string file_difference(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace train_gpt
