// Presets: the configurations in configs/, which commands take by name.
#pragma once
#include <filesystem>
#include <string>

namespace train_gpt {

/// The file of a configuration: a path, or the name of a preset such as gpt2-124m. A file of that
/// name comes first; presets are in ./configs, beside the program, in its repository, or where
/// `make install` put them. Throws Error for what is neither, with the nearest presets.
std::filesystem::path find_config(const std::string& name);

}  // namespace train_gpt
