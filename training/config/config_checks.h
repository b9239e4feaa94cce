// The rules between the keys of a configuration. Each key's own rule is in config_keys.h.
#pragma once
#include <string>

#include "training/config/config.h"

namespace train_gpt {

/// Checks a configuration for `world` ranks (0: not known yet). Throws Error if values do not fit
/// together, or if so many ranks cannot share them. The message begins with `name`. Values that the
/// message suggests have been tried: a configuration with such a value passes all checks.
void check_config(const Config& config, const std::string& name, int world = 0);

/// Whether a configuration keeps the rules between keys, and `world` ranks can make its mesh. world
/// = 0: any number of ranks.
bool keeps_rules(const Config& config, int world);

}  // namespace train_gpt
