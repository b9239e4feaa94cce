// What an unknown name most likely stands for.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt {

/// The valid key that an unknown one most likely stands for: alike, or called so by other programs;
/// empty if none is.
std::string nearest_key(const std::string& path);

/// The only key with this name, in any section, or the one that other programs call so; empty if
/// there is none.
std::string key_called(std::string_view name);

/// The one of some names that is most like this one; empty if none is alike.
std::string nearest_name(const std::string& name, const std::vector<std::string>& names);

/// The section whose name is most like this one; empty if none is alike.
std::string nearest_section(const std::string& name);

}  // namespace train_gpt
