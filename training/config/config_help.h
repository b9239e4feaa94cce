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

/// Keys as columns of key, default and meaning. name: a section or a key; empty: all keys. No line
/// is wider than `columns` (0: 100) unless a single word is. Throws UsageError if `name` is neither
/// a section nor a key.
std::string config_help(const std::string& name, int columns);

/// All keys as a page in Markdown (docs/keys.md): a table for each section, with key, type,
/// default, rule, meaning.
std::string config_reference();

}  // namespace train_gpt
