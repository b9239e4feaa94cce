// The program's version, and what it was built with.
#pragma once
#include <string>

namespace train_gpt {

/// "0.1.0 (abc1234)"
std::string version();

/// For --version: version, build, libraries, devices found; several lines.
std::string version_report();

}  // namespace train_gpt
