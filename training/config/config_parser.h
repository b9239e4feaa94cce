// Sets a configuration's keys from JSON and from --set. Each value is checked by the key's own rule
// (config_keys.h).
#pragma once
#include <string>

#include "training/config/config.h"

namespace train_gpt {

/// Reads a JSON text, in which comments are allowed. Keys that the text does not name stay as they
/// are. Throws Error, which names the file (`name`), key path, value and rule. For an unknown key,
/// the message names the nearest valid key.
void read_config(Config& config, const std::string& text, const std::string& name);

/// Applies "section.key=value" of --set. The value is JSON; a text may have no quotes. Throws as
/// read_config(), and UsageError if there is no value. `option`: what gave the text.
void apply_override(Config& config, const std::string& text, const std::string& option = "--set");

}  // namespace train_gpt
