// The program's version, and what it was built with.
#pragma once
#include <string>

namespace train_gpt {

/// "0.9.0 (abc1234)": the number in the file VERSION, and the commit if it is known.
std::string version();

/// For --version: version, build, libraries, devices found; several lines.
std::string version_report();

}  // namespace train_gpt
