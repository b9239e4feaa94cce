#include "training/sweep/variants.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "base/json_text.h"
#include "training/config/config_keys.h"
#include "training/config/config_parser.h"

namespace train_gpt {

namespace {

/// Cuts a list at its commas, except within quotes, lists and objects.
std::vector<std::string> cut_at_commas(std::string_view list) {
    std::vector<std::string> values(1);
    int depth = 0;
    bool in_text = false, escaped = false;
    for (const char c : list) {
        if (!in_text && depth == 0 && c == ',') {
            values.emplace_back();
            continue;
        }
        if (!in_text && (c == '[' || c == '{')) ++depth;
        if (!in_text && (c == ']' || c == '}')) depth = std::max(0, depth - 1);
        if (c == '"' && !escaped) in_text = !in_text;
        escaped = in_text && c == '\\' && !escaped;
        values.back() += c;
    }
    return values;
}

/// Throws Error for keys that a sweep sets itself, or that do not change what is learnt.
void require_variable(const std::string& argument, const std::string& key) {
    if (key == "run_dir")
        throw Error("--vary ", argument,
                    ": each run of a sweep has its own folder in run_dir; set run_dir itself with "
                    "--set");
    if (key == "seed")
        throw Error("--vary ", argument, ": --seeds N trains with the seeds from `seed` on");
    if (key == "description")
        throw Error("--vary ", argument, ": a description changes nothing in a run");
}

}  // namespace

std::vector<VariedKey> varied_keys(const std::vector<std::string>& arguments) {
    std::vector<VariedKey> keys;
    for (const std::string& argument : arguments) {
        const size_t equals = std::min(argument.find('='), argument.size());
        const std::string path = argument.substr(0, equals);
        std::vector<std::string> given(1);
        if (equals < argument.size()) given = cut_at_commas(argument.substr(equals + 1));
        VariedKey varied{.key = {}, .values = {}, .is_number = true};
        for (const std::string& text : given) {
            const std::string whole = equals < argument.size() ? concat(path, "=", text) : path;
            Config config;
            apply_override(config, whole, "--vary");
            const ConfigKey& key = *find_config_key(path);
            varied.key = key.path;
            require_variable(argument, varied.key);
            const Json value = value_of(config, key);
            varied.is_number = varied.is_number && value.is_number();
            const std::string json = to_text(value);
            if (std::ranges::find(varied.values, json) != varied.values.end())
                throw Error("--vary ", argument, ": the value ", json,
                            " comes twice; name each value once");
            varied.values.push_back(json);
        }
        for (const VariedKey& other : keys)
            if (other.key == varied.key)
                throw Error("--vary ", argument, ": ", varied.key,
                            " is varied twice; name all its values in one --vary");
        if (varied.is_number)
            std::ranges::sort(varied.values, {},
                              [](const std::string& text) { return std::stod(text); });
        keys.push_back(std::move(varied));
    }
    return keys;
}

std::vector<Combination> combinations_of(const std::vector<VariedKey>& keys) {
    std::vector<Combination> all(1);
    for (const VariedKey& key : keys) {
        if (all.size() * key.values.size() > 100'000)
            throw Error("--vary gives more than 100000 combinations; name fewer values");
        std::vector<Combination> longer;
        for (const Combination& combination : all)
            for (const std::string& value : key.values) {
                longer.push_back(combination);
                longer.back().values.push_back(value);
                longer.back().overrides.push_back(concat(key.key, "=", value));
            }
        all = std::move(longer);
    }
    return all;
}

std::string run_name(const std::vector<VariedKey>& keys, const Combination& combination,
                     uint64_t seed) {
    constexpr size_t longest = 200;
    std::string whole;
    for (size_t k = 0; k < keys.size(); ++k)
        whole += concat(keys[k].key, "=", plain_value(combination.values[k]), ",");
    whole += concat("seed=", seed);
    std::string name;
    for (const char c : whole) {
        const bool is_plain = std::isalnum(static_cast<unsigned char>(c)) ||
                              std::string_view("_.=,+-").find(c) != std::string_view::npos;
        name += is_plain ? c : '_';
    }
    if (name == whole && name.size() <= longest) return name;
    name.resize(std::min(name.size(), longest));
    return concat(name, ",", hash_text(whole).substr(0, 8));
}

std::string describe(const std::vector<VariedKey>& keys, const std::vector<std::string>& values) {
    std::string text;
    for (size_t k = 0; k < keys.size(); ++k)
        text += concat(k > 0 ? ", " : "", keys[k].key, " = ", plain_value(values[k]));
    return keys.empty() ? "the configuration" : text;
}

std::string plain_value(const std::string& json) {
    const Json value = try_parse_json(json);
    return value.is_string() ? value.get<std::string>() : json;
}

}  // namespace train_gpt
