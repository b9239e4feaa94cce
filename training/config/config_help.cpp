#include "training/config/config_help.h"

#include <algorithm>
#include <sstream>

#include "base/error.h"
#include "base/text_table.h"
#include "training/config/config_keys.h"
#include "training/config/nearest_key.h"

namespace train_gpt {

namespace {

constexpr size_t key_column = 26, default_column = 11;  // their widths

/// Removes Markdown's marks and breaks the text into lines that begin at column `indent`; the first
/// continues a line of `at` columns.
std::string wrapped(const std::string& text, size_t at, size_t indent, size_t columns) {
    std::string lines;
    std::istringstream words(text);
    bool first = true;
    for (std::string word; words >> word; first = false) {
        std::erase(word, '`');
        const size_t wide = width_of(word);
        if (!first && at + 1 + wide > columns) {
            lines += "\n" + std::string(indent, ' ');
            at = indent;
        } else if (!first) {
            lines += ' ';
            ++at;
        }
        lines += word;
        at += wide;
    }
    return lines + "\n";
}

/// One row: key and default, then values and meaning in the third column.
std::string row(const KeyDescription& key, size_t columns) {
    const size_t indent = key_column + default_column;
    std::string line =
        padded(padded(key.path, key_column - 1) + " " + key.fallback, indent - 1) + " ";
    const size_t at = width_of(line);
    return line +
           wrapped(key.meaning + " (" + key.rule + ")", at, indent, std::max(columns, indent + 20));
}

std::string cell(const std::string& text) {
    std::string escaped;
    for (const char c : text) {
        if (c == '|') escaped += '\\';
        escaped += c;
    }
    return escaped;
}

}  // namespace

std::vector<KeyDescription> describe_keys() {
    std::vector<KeyDescription> descriptions;
    Config defaults;
    for (const ConfigKey& key : config_keys()) {
        const KeyField field = key.field(defaults);
        const char* type = is_switch(field)    ? "switch"
                           : is_text(field)    ? "text"
                           : is_sources(field) ? "text or list"
                           : is_texts(field)   ? "text or list"
                           : is_numbers(field) ? "list"
                           : is_real(field)    ? "number"
                                               : "integer";
        descriptions.push_back({std::string(key.path), type, to_text(value_of(defaults, key)),
                                rule_text(key), std::string(key.meaning)});
    }
    return descriptions;
}

std::string config_help(const std::string& name, int columns) {
    if (columns == 0) columns = 100;
    std::string text, section;
    for (const KeyDescription& key : describe_keys()) {
        const std::string of = key.path.substr(0, key.path.find('.'));
        if (!name.empty() && name != key.path && name != of) continue;
        if (name.empty() && !section.empty() && key.path != of && section != of) text += "\n";
        section = of;
        text += row(key, static_cast<size_t>(columns));
    }
    if (!text.empty()) return text;
    // A word without a point may be the beginning of a section's name, or a key without its
    // section.
    const std::string section_alike = name.find('.') == name.npos ? nearest_section(name) : "";
    const bool begins = section_alike.starts_with(name);
    const std::string key = begins ? "" : nearest_key(name);
    throw UsageError("there is no key or section \"", name, "\"; ",
                     !key.empty() ? concat("the nearest key is \"", key, "\"")
                     : !section_alike.empty()
                         ? concat("the nearest section is \"", section_alike, "\"")
                         : "`train_gpt config` lists them");
}

std::string config_reference() {
    std::string text =
        "# Keys of the configuration\n\n"
        "Written by `train_gpt config --markdown`. `train_gpt config KEY` prints one, and\n"
        "`--set KEY=VALUE` overrides one.\n";
    std::string before = "none";
    for (const KeyDescription& key : describe_keys()) {
        if (const std::string section(section_of_key(key.path)); section != before) {
            text +=
                concat("\n## ", section.empty() ? "Without a section" : section,
                       "\n\n| key | type | default | rule | meaning |\n|---|---|---|---|---|\n");
            before = section;
        }
        text += concat("| `", key.path, "` | ", key.type, " | `", key.fallback, "` | ",
                       cell(key.rule), " | ", cell(key.meaning), " |\n");
    }
    return text;
}

}  // namespace train_gpt
