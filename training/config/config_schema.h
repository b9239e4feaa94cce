// The configuration's keys for editors: what `train_gpt config --schema` prints.
#pragma once
#include <string>

namespace train_gpt {

/// A JSON Schema (draft 2020-12) of the configuration.
std::string config_schema();

}  // namespace train_gpt
