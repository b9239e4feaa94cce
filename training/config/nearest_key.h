// What an unknown name most likely stands for.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt {

/// The valid key for which an unknown key most likely stands: a key that other programs call so, or
/// the key whose path is most alike. Empty if no key is alike.
std::string nearest_key(const std::string& path);

/// The key that other programs call by this name, or else the only key with this name in any
/// section. Empty if there is none, or more than one.
std::string key_called(std::string_view name);

/// The name in `names` that is most like `name`; empty if none is alike.
std::string nearest_name(const std::string& name, const std::vector<std::string>& names);

/// The section whose name begins with `name` or is most like it; empty if none is alike.
std::string nearest_section(const std::string& name);

}  // namespace train_gpt
