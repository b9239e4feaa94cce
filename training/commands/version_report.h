// What the program was built with.
#pragma once
#include <string>

namespace train_gpt {

/// For --version: version, build, libraries, devices found; several lines.
std::string version_report();

}  // namespace train_gpt
