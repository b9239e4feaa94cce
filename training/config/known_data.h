// Data and vocabularies that the project's scripts fetch or make.
#pragma once
#include <string>

namespace train_gpt {

/// The command that makes a path such as data/tinystories/train_*.bin, as presets name them; empty
/// for other paths.
std::string command_that_makes(const std::string& path);

/// Throws Error with that command where such a path, or glob, is not there yet.
void require_made(const std::string& path);

}  // namespace train_gpt
