// The table of the configuration's keys. Parser, checks, output, help and schema are made from it.
// A new key is a member of Config, with its default, and a row of this table.
#pragma once
#include <span>
#include <string>
#include <string_view>

#include "base/json_text.h"
#include "training/config/key_rules.h"

namespace train_gpt {

/// Whether values are texts or words.
bool is_text(const KeyField& field);
/// Whether values are true and false, or "on" and "off". Some of these keys also allow "auto".
bool is_switch(const KeyField& field);
bool is_sources(const KeyField& field);
bool is_numbers(const KeyField& field);
/// Whether values are lists of texts. One text stands for a list of one, and "" for an empty list.
bool is_texts(const KeyField& field);
bool is_real(const KeyField& field);
/// Whether values are whole numbers or the word "auto".
bool is_optional_number(const KeyField& field);

/// Whether values may be true and false: of switches, and of keys one of whose words is "on".
bool takes_switch(const ConfigKey& key, const KeyField& field);
/// Whether values are lists of whole numbers, and a number n stands for the first n: 0 … n − 1.
bool takes_first(const ConfigKey& key);

/// Every key, in the order in which the configuration is printed.
std::span<const ConfigKey> config_keys();

/// Null if there is no such key. Also finds a key by its name in earlier versions.
const ConfigKey* find_config_key(std::string_view path);

/// The two parts of a path. A path without a section has an empty section.
std::string_view section_of_key(std::string_view path);
std::string_view name_of_key(std::string_view path);

std::vector<std::string_view> config_sections();
bool is_config_section(std::string_view name);
/// The path of a section's first key.
std::string_view first_key_of(std::string_view section);

/// A key's value as JSON. Takes a copy of the configuration, since ConfigKey::field gives pointers
/// that allow writing.
Json value_of(Config config, const ConfigKey& key);

/// A key's rule for people, such as "a whole number from 1 to 4096".
std::string rule_text(const ConfigKey& key);

/// What a source of training data looks like, for error messages and help.
constexpr const char* source_shape = R"({"glob": text, "weight": number above 0, "name": text})";

}  // namespace train_gpt
