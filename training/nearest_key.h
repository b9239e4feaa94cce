// What an unknown name in a configuration most likely stands for.
#pragma once
#include <string>

namespace train_gpt {

/// The valid key that an unknown one most likely stands for: alike, or called so by other programs;
/// empty if none is.
std::string nearest_key(const std::string& path);

/// The section whose name is most like this one; empty if none is alike.
std::string nearest_section(const std::string& name);

}  // namespace train_gpt
