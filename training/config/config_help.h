// The configuration's reference for people: what `train_gpt config` prints.
#pragma once
#include <string>
#include <vector>

namespace train_gpt {

/// The description of a key.
struct KeyDescription {
    std::string path, type, fallback /* its default, as JSON */, rule, meaning;
};
/// The descriptions of all keys, section by section.
std::vector<KeyDescription> describe_keys();

/// All keys as columns of key, default and meaning, no line wider than `columns` (0: 100) where its
/// words allow it; or with a name those of the section, or the one key. Throws UsageError for a
/// name that is neither.
std::string config_help(const std::string& name, int columns);

/// All keys as a Markdown table: key, type, default, rule, meaning.
std::string config_reference();

}  // namespace train_gpt
