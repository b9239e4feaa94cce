// Presets: the configurations in configs/, which commands take by name.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

namespace train_gpt {

/// The file of a configuration. `name`: a path, or the name of a preset such as gpt2-124m. If both
/// exist, returns the path. Presets are in ./configs, beside the program, in the program's
/// repository, or where `make install` put them. Throws Error if `name` is neither; the message
/// names the nearest presets.
std::filesystem::path find_config(const std::string& name);

/// The folders in which presets may be.
std::vector<std::filesystem::path> preset_folders();

/// The names of all presets that are found, sorted.
std::vector<std::string> preset_names();

}  // namespace train_gpt
