// Values of the configuration as a reader understands them: what a special 0 and "auto" stand for.
#pragma once
#include <string>

#include "base/json_text.h"

namespace train_gpt {

/// The value of a key as text. Where the key's help says what the value stands for, as in "0: no
/// limit", that is said, with the value in brackets: "no limit (0)". "auto" that nothing explains
/// is "chosen by the run (auto)". Empty for null.
std::string setting_text(const std::string& key, const Json& value);

/// What a key's help says after "VALUE: ", up to the end of the clause; empty if it says nothing.
std::string meaning_of_value(const std::string& help, const std::string& value);

}  // namespace train_gpt
