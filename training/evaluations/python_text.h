// Texts as Python sees them, whose programs define how items become prompts.
#pragma once
#include <cstddef>
#include <string_view>

namespace train_gpt {

/// str.rstrip(): without the white space at the end, as str.isspace() defines it.
std::string_view python_rstrip(std::string_view text);
/// str.strip(): also without the white space at the beginning.
std::string_view python_strip(std::string_view text);
/// len(): the number of code points.
size_t python_length(std::string_view text);

}  // namespace train_gpt
