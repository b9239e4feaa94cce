// Reading a configuration: its file, the options that override it, and all checks.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "training/config/config.h"

namespace train_gpt {

/// Reads a JSON file (comments tolerated), applies overrides "section.key=value" in order, checks
/// every key's type and rule and the rules between keys. Throws Error naming file, key path, value
/// and rule; an unknown key is named with the nearest valid one.
Config load_config(const std::filesystem::path& file, const std::vector<std::string>& overrides);

/// Reads a configuration from a JSON text, as load_config() does; `name` stands for the file in
/// errors.
Config parse_config(const std::string& json, const std::string& name,
                    const std::vector<std::string>& overrides = {});

}  // namespace train_gpt
