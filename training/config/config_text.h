// A configuration as JSON, whole or key by key.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "training/config/config.h"

namespace train_gpt {

/// The whole configuration, every key with its value, as strict JSON that load_config reads back
/// equal.
std::string to_json(const Config& config);

/// The keys on which two configurations differ, each as "KEY changed from OLD to NEW".
std::vector<std::string> config_differences(const Config& from, const Config& to);

/// Every key with its value as JSON.
std::map<std::string, std::string> config_values(const Config& config);

}  // namespace train_gpt
