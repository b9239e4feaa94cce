#include "training/config/config_text.h"

#include "base/error.h"
#include "base/json_text.h"
#include "training/config/config_keys.h"
#include "training/config/config_parser.h"

namespace train_gpt {

std::string to_json(const Config& config) {
    Json root;
    for (const ConfigKey& key : config_keys()) {
        const std::string section(section_of_key(key.path));
        Json& parent = section.empty() ? root : root[section];
        parent[std::string(name_of_key(key.path))] = value_of(config, key);
    }
    return to_text(root, 4) + "\n";
}

std::vector<std::string> config_differences(const Config& from, const Config& to) {
    std::vector<std::string> differences;
    for (const ConfigKey& key : config_keys()) {
        const Json before = value_of(from, key), after = value_of(to, key);
        if (before != after)
            differences.push_back(
                concat(key.path, " changed from ", to_text(before), " to ", to_text(after)));
    }
    return differences;
}

std::map<std::string, std::string> config_values(const Config& config) {
    std::map<std::string, std::string> values;
    for (const ConfigKey& key : config_keys())
        values[std::string(key.path)] = to_text(value_of(config, key));
    return values;
}

}  // namespace train_gpt
