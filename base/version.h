// The program's version.
#pragma once
#include <string>

namespace train_gpt {

/// "0.9.0 (abc1234)": the number in the file VERSION, and the commit if it is known.
std::string version();

}  // namespace train_gpt
