// Data and vocabularies that the project's scripts fetch or make.
#pragma once
#include <string>

namespace train_gpt {

/// The command that makes the data at a path that presets name, such as
/// data/tinystories/train_*.bin. Empty for other paths.
std::string command_that_makes(const std::string& path);

/// Throws Error if command_that_makes() knows the path or glob and it does not exist yet. The
/// message names the command.
void require_made(const std::string& path);

}  // namespace train_gpt
