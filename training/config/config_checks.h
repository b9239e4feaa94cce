// The rules between the keys of a configuration. Each key's own rule is in config_keys.h.
#pragma once
#include <string>

#include "training/config/config.h"

namespace train_gpt {

/// Throws Error, whose message begins with `name`, for values that do not fit together, or that so
/// many ranks cannot share (world; 0: not known yet). A value that the message suggests has been
/// tried: with it, the configuration fits in all.
void check_config(const Config& config, const std::string& name, int world = 0);

/// Whether a configuration keeps the rules between keys, and so many ranks (unless 0) make its
/// mesh.
bool keeps_rules(const Config& config, int world);

}  // namespace train_gpt
