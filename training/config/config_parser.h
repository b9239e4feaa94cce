// From JSON and from --set to the values of a configuration's keys. Each value is checked by the
// key's own rule (config_keys.h).
#pragma once
#include <string>

#include "training/config/config.h"

namespace train_gpt {

/// Reads a JSON text, in which comments are tolerated; keys that it does not name stay as they are.
/// Throws Error naming `name` (the file), key path, value and rule; an unknown key is named with
/// the nearest valid one.
void read_config(Config& config, const std::string& text, const std::string& name);

/// Applies "section.key=value" of --set. The value is JSON; for a text it may stand without quotes.
/// Throws as read_config(), and UsageError if there is no value.
void apply_override(Config& config, const std::string& text);

}  // namespace train_gpt
