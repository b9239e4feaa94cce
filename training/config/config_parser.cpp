#include "training/config/config_parser.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/json_text.h"
#include "base/path.h"
#include "dataloader/mixture.h"
#include "training/config/config_keys.h"
#include "training/config/json_mistake.h"
#include "training/config/nearest_key.h"

namespace train_gpt {

namespace {

/// Text for an error message, truncated if it is long.
std::string shorten(const std::string& text) {
    constexpr size_t longest = 80;
    if (text.size() <= longest) return text;
    size_t end = longest;  // not inside a UTF-8 character
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
    return text.substr(0, end) + "…";
}

/// The end of a sentence about an unknown name.
std::string suggestion(const std::string& what, const std::string& nearest) {
    return nearest.empty() ? concat("`train_gpt config` lists all keys")
                           : concat("the nearest valid ", what, " is \"", nearest, "\"");
}

[[noreturn]] void refuse(const std::string& origin, const ConfigKey& key,
                         const std::string& value) {
    throw Error(origin, ": ", key.path, " = ", shorten(value), " is not valid: it must be ",
                rule_text(key));
}

[[noreturn]] void unknown_key(const std::string& origin, const std::string& path) {
    throw Error(origin, ": unknown key \"", shorten(path), "\"; ",
                suggestion("key", nearest_key(path)));
}

/// Reads an integer from JSON; 5e5 and 500000.0 are integers too. Returns false if the value is not
/// an integer or does not fit.
template <class Integer>
bool read_integer(const Json& value, Integer& out) {
    using Limits = std::numeric_limits<Integer>;
    if (value.is_number_unsigned()) {
        const auto number = value.get<uint64_t>();
        if (number > static_cast<uint64_t>(Limits::max())) return false;
        out = static_cast<Integer>(number);
    } else if (value.is_number_integer()) {
        const auto number = value.get<int64_t>();
        if (std::is_unsigned_v<Integer> || number < static_cast<int64_t>(Limits::min()))
            return false;
        out = static_cast<Integer>(number);
    } else if (value.is_number_float()) {
        const double number = value.get<double>();
        if (std::trunc(number) != number || std::abs(number) > max_exact_integer) return false;
        if (number < static_cast<double>(Limits::min()) ||
            number > static_cast<double>(Limits::max()))
            return false;
        out = static_cast<Integer>(number);
    } else {
        return false;
    }
    return true;
}

/// A JSON string that can name a file; nothing for other values.
std::optional<std::string> read_text(const Json& value) {
    if (!value.is_string()) return {};
    auto text = value.get<std::string>();
    if (text.find('\0') != std::string::npos)
        return {};  // neither a path nor a prompt may have one
    return text;
}

/// A path or glob with the home folder in place of "~"; `where` names the key in errors.
std::string read_path(const std::string& text, const std::string& where) {
    try {
        return expand_home(text);
    } catch (const Error& error) {
        throw Error(where, ": ", error.what());
    }
}

/// Sources of training data: a glob, or a list of objects; nothing for other values. Throws Error
/// for a mistake in a list; `where` names the list in the message.
std::optional<TrainSources> read_sources(const Json& value, const std::string& where) {
    if (const auto glob = read_text(value)) {
        if (glob->empty()) return TrainSources{};
        const std::string path = read_path(*glob, where);
        return TrainSources{{.glob = path, .name = path}};
    }
    if (!value.is_array()) return {};
    if (value.empty() || value.size() > Mixture::max_sources)
        throw Error(where, " lists ", value.size(), " sources; it may be 1 to ",
                    Mixture::max_sources);
    TrainSources sources;
    std::set<std::string> names;
    for (const Json& entry : value) {
        const auto refuse = [&](const auto&... what) {
            throw Error(where, ": source ", sources.size() + 1, " of the list ", what...,
                        "; a source is ", source_shape);
        };
        if (!entry.is_object()) refuse("is ", shorten(to_text(entry)));
        Config::Data::Source source;
        for (const auto& [name, item] : entry.items()) {
            const auto text = read_text(item);
            if (name == "glob" && text)
                source.glob = read_path(*text, where);
            else if (name == "name" && text)
                source.name = *text;
            else if (name == "weight" && item.is_number())
                source.weight = item.get<double>();
            else
                refuse("has \"", shorten(name), "\": ", shorten(to_text(item)));
        }
        if (source.name.empty()) source.name = source.glob;
        if (source.glob.empty()) refuse("has no glob");
        if (!(source.weight > 0)) refuse("has the weight ", source.weight);
        if (!names.insert(source.name).second)
            refuse("has the same name as an earlier source, \"", shorten(source.name), "\"");
        sources.push_back(std::move(source));
    }
    return sources;
}

/// One path or a list of paths; nothing for other values.
std::optional<Texts> read_texts(const Json& value, const std::string& where) {
    Texts texts;
    for (const Json& item : value.is_array() ? value : Json::array({value})) {
        const auto text = read_text(item);
        if (!text || (text->empty() && value.is_array())) return {};
        if (!text->empty()) texts.push_back(read_path(*text, where));
    }
    return texts;
}

/// Stores a JSON value in a key's field, or throws with the key's rule.
void assign(Config& config, const ConfigKey& key, const Json& value, const std::string& origin) {
    const KeyField field = key.field(config);
    const bool valid = std::visit(
        [&](auto* target) {
            using Value = std::remove_pointer_t<decltype(target)>;
            if constexpr (std::is_same_v<Value, std::string>) {
                const auto text = read_text(value);
                if (!text) return false;
                const auto words = key.rule.words();
                if (!words.empty() && std::find(words.begin(), words.end(), *text) == words.end())
                    return false;
                *target =
                    key.rule.is_path ? read_path(*text, concat(origin, ": ", key.path)) : *text;
                return true;
            } else if constexpr (std::is_same_v<Value, bool>) {
                const std::string word = read_text(value).value_or("");
                if (!value.is_boolean() && word != "on" && word != "off") return false;
                *target = value.is_boolean() ? value.get<bool>() : word == "on";
                return true;
            } else if constexpr (is_one_of<Value>) {
                if (value.is_boolean() && takes_switch(key, field))
                    return target->parse(value.get<bool>() ? "on" : "off");
                const auto text = read_text(value);
                return text && target->parse(*text);
            } else if constexpr (std::is_same_v<Value, TrainSources>) {
                const auto sources = read_sources(value, concat(origin, ": ", key.path));
                if (sources) *target = *sources;
                return sources.has_value();
            } else if constexpr (std::is_same_v<Value, Texts>) {
                const auto texts = read_texts(value, concat(origin, ": ", key.path));
                const auto words = key.rule.words();
                const auto is_known = [&](const std::string& text) {
                    return std::ranges::find(words, text) != words.end();
                };
                if (texts && !words.empty() &&
                    (texts->empty() || !std::ranges::all_of(*texts, is_known)))
                    return false;
                if (texts) *target = *texts;
                return texts.has_value();
            } else if constexpr (std::is_same_v<Value, WholeNumbers>) {
                Value numbers;
                if (int first = 0; takes_first(key) && value.is_number()) {
                    if (!read_integer(value, first) || !key.rule.allows(first)) return false;
                    for (int i = 0; i < first; ++i) numbers.push_back(i);
                    *target = std::move(numbers);
                    return true;
                }
                if (!value.is_array()) return false;
                for (const Json& item : value) {
                    int number = 0;
                    if (!read_integer(item, number) || !key.rule.allows(number)) return false;
                    numbers.push_back(number);
                }
                *target = std::move(numbers);
                return true;
            } else if constexpr (std::is_same_v<Value, std::optional<int>>) {
                int number = 0;
                const bool is_auto = read_text(value) == "auto";
                if (!is_auto && (!read_integer(value, number) || !key.rule.allows(number)))
                    return false;
                *target = is_auto ? std::nullopt : std::optional(number);
                return true;
            } else if constexpr (std::is_same_v<Value, double>) {
                if (!value.is_number() || !key.rule.allows(value.get<double>())) return false;
                *target = value.get<double>();
                return true;
            } else {
                Value number{};
                if (!read_integer(value, number) || !key.rule.allows(static_cast<double>(number)))
                    return false;
                *target = number;
                return true;
            }
        },
        field);
    if (!valid) refuse(origin, key, to_text(value));
}

/// Parses JSON with comments. Errors carry line and column; a key that occurs twice in one object
/// is refused, because one of its values would be lost silently.
Json parse_root(const std::string& text, const std::string& name) {
    struct Object {
        std::set<std::string> keys;
        std::string key;  // being parsed
    };
    std::vector<Object> open;
    std::set<std::string>
        paths;  // "model.n_layer" may also be written as {"model": {"n_layer": …}}
    int arrays = 0;
    const auto path = [&] {
        std::string joined;
        for (const Object& object : open) joined += (joined.empty() ? "" : ".") + object.key;
        return joined;
    };
    const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
        if (depth > max_json_depth)
            throw Error(name, " is nested more than ", max_json_depth,
                        " levels deep; a configuration needs three");
        if (event == Json::parse_event_t::object_start) open.emplace_back();
        if (event == Json::parse_event_t::object_end) open.pop_back();
        if (event == Json::parse_event_t::array_start) ++arrays;
        if (event == Json::parse_event_t::array_end) --arrays;
        if (event == Json::parse_event_t::key) {
            open.back().key = parsed.get<std::string>();
            // A key's old name counts as the key.
            const ConfigKey* const known = find_config_key(path());
            if (!open.back().keys.insert(open.back().key).second ||
                (arrays == 0 && !paths.insert(known ? std::string(known->path) : path()).second))
                throw Error(name, ": the key \"", shorten(path()),
                            "\" appears twice; remove one of them");
        }
        return true;
    };
    if (text.find_first_not_of(" \t\r\n") == std::string::npos)
        throw Error(
            name,
            " is empty, but a configuration in JSON belongs here; start from one in configs/");
    // The parser takes a NUL for the end of the text.
    if (const size_t nul = text.find('\0'); nul != text.npos)
        throw Error(name, ", ", place_of(nul, text), ": not valid JSON: a NUL byte");
    try {
        return Json::parse(text, watch, true, true);
    } catch (const Json::parse_error& error) {
        if (const std::string mistake = find_json_mistake(text); !mistake.empty())
            throw Error(name, ", ", mistake);
        // nlohmann's text: "[json.exception…] parse error at line 1, column 2: <what is wrong>".
        std::string what = error.what();
        const size_t at = what.find("column ");
        const size_t colon = at == std::string::npos ? at : what.find(": ", at);
        if (colon != std::string::npos) what.erase(0, colon + 2);
        throw Error(name, ", ", place_of(error, text), ": not valid JSON: ", what);
    } catch (const Json::out_of_range&) {
        const std::string key = path();
        throw Error(name, ": ", key.empty() ? "a value" : key,
                    " is a number too large to represent");
    }
}

/// Reads an object whose keys have paths that begin with the prefix.
void read_section(Config& config, const std::string& prefix, const Json& object,
                  const std::string& origin) {
    for (const auto& item : object.items()) {
        const std::string path = prefix + item.key();
        if (path == "$schema") continue;  // editors put it there
        if (const ConfigKey* key = find_config_key(path)) {
            assign(config, *key, item.value(), origin);
        } else if (prefix.empty() && is_config_section(path)) {
            if (!item.value().is_object())
                throw Error(origin, ": ", path, " = ", shorten(to_text(item.value())),
                            " is not valid: it must be a section, an object such as { \"",
                            name_of_key(first_key_of(path)), "\": … }");
            read_section(config, path + ".", item.value(), origin);
        } else if (prefix.empty() && item.value().is_object()) {
            throw Error(origin, ": unknown section \"", shorten(path), "\"; ",
                        suggestion("section", nearest_section(path)));
        } else {
            unknown_key(origin, path);
        }
    }
}

}  // namespace

void read_config(Config& config, const std::string& text, const std::string& name) {
    const Json root = parse_root(text, name);
    if (!root.is_object()) throw Error(name, ": a configuration must be one JSON object { … }");
    read_section(config, "", root, name);
}

void apply_override(Config& config, const std::string& text, const std::string& option) {
    const std::string origin = option + " " + shorten(text);
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0)
        throw UsageError(origin, " is not an override; write ", option, " section.key=value");
    const std::string path = text.substr(0, equals), raw = text.substr(equals + 1);
    const ConfigKey* key = find_config_key(path);
    if (!key) {
        if (is_config_section(path))
            throw Error(origin, ": ", path, " is a section; name one of its keys, such as ",
                        first_key_of(path));
        unknown_key(origin, path);
    }
    const KeyField field = key->field(config);
    Json value = try_parse_json(raw);
    // A damaged list must not be taken for a glob; "[ab]*.bin" is a glob.
    const size_t second = raw.find_first_not_of(" \t\n", 1);
    const bool is_list = value.is_array() || (raw.starts_with('[') && second != raw.npos &&
                                              raw[second] == (is_texts(field) ? '"' : '{'));
    const bool is_bare = is_text(field) || ((is_sources(field) || is_texts(field)) && !is_list);
    const bool has_words = takes_switch(*key, field) || is_optional_number(field);
    if (has_words ? value.is_discarded() : is_bare && !value.is_string()) value = raw;
    if (value.is_discarded()) refuse(origin, *key, raw);  // 1e400 ends here too
    if (is_bare) {
        try {
            (void)value.dump();
        } catch (const Json::exception&) {
            throw Error(origin, ": the value is not valid UTF-8");
        }
    }
    assign(config, *key, value, origin);
}

}  // namespace train_gpt
