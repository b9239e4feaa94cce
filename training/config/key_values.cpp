// Implements a part of config_keys.h: the values of keys, and their rules for people.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <type_traits>

#include "base/error.h"
#include "training/config/config_keys.h"

namespace train_gpt {

namespace {

std::string number_text(double value) {
    char text[32];
    const bool is_exact_integer =
        std::abs(value) <= max_exact_integer && value == std::floor(value);
    std::snprintf(text, sizeof text, is_exact_integer ? "%.0f" : "%.15g", value);
    return text;
}

/// `one of "auto", "cpu" or "cuda"`.
std::string words_text(std::span<const std::string_view> words) {
    std::string text = "one of";
    for (size_t i = 0; i < words.size(); ++i)
        text += concat(i == 0 ? " \"" : i + 1 == words.size() ? " or \"" : ", \"", words[i], "\"");
    return text;
}

/// A single source as its glob, several as a list.
Json to_value(const TrainSources& sources) {
    if (sources.empty()) return "";
    if (sources.size() == 1 && sources[0].name == sources[0].glob) return sources[0].glob;
    Json list = Json::array();
    for (const auto& source : sources)
        list.push_back({{"glob", source.glob}, {"weight", source.weight}, {"name", source.name}});
    return list;
}
Json to_value(const Texts& texts) { return texts.size() == 1 ? Json(texts[0]) : Json(texts); }

}  // namespace

bool is_text(const KeyField& field) {
    return std::visit(
        [](auto* value) {
            using Value = std::remove_pointer_t<decltype(value)>;
            return std::is_same_v<Value, std::string> || is_one_of<Value>;
        },
        field);
}
bool is_switch(const KeyField& field) {
    return std::holds_alternative<bool*>(field) || std::holds_alternative<OneOf<bool>*>(field) ||
           std::holds_alternative<OneOf<std::optional<bool>>*>(field);
}
bool is_sources(const KeyField& field) { return std::holds_alternative<TrainSources*>(field); }
bool is_texts(const KeyField& field) { return std::holds_alternative<Texts*>(field); }
bool is_numbers(const KeyField& field) { return std::holds_alternative<WholeNumbers*>(field); }
bool is_real(const KeyField& field) { return std::holds_alternative<double*>(field); }
bool is_optional_number(const KeyField& field) {
    return std::holds_alternative<std::optional<int>*>(field);
}

bool takes_switch(const ConfigKey& key, const KeyField& field) {
    const auto words = key.rule.words();
    return is_switch(field) || std::ranges::find(words, "on") != words.end();
}
bool takes_first(const ConfigKey& key) { return key.path == "model.dense_layers"; }

Json value_of(Config config, const ConfigKey& key) {
    return std::visit(
        [](auto* value) {
            using Value = std::remove_pointer_t<decltype(value)>;
            if constexpr (std::is_same_v<Value, TrainSources> || std::is_same_v<Value, Texts>)
                return to_value(*value);
            else if constexpr (is_one_of<Value>)
                return Json(value->word());
            else if constexpr (std::is_same_v<Value, std::optional<int>>)
                return *value ? Json(**value) : Json("auto");
            else
                return Json(*value);
        },
        key.field(config));
}

std::string rule_text(const ConfigKey& key) {
    const KeyRule& rule = key.rule;
    Config defaults;
    const KeyField field = key.field(defaults);
    if (is_switch(field))
        return concat(rule.word_count == 3 ? "\"auto\", " : "",
                      "true or false (\"on\" or \"off\")");
    if (rule.word_count > 0)
        return concat(words_text(rule.words()), is_texts(field) ? ", or a list of them" : "");
    if (is_text(field)) return "a text";
    if (is_sources(field)) return concat("a text, or a list of sources ", source_shape);
    if (is_texts(field)) return "a text, or a list of texts";
    if (is_numbers(field))
        return concat(takes_first(key) ? "a whole number, or a list of whole numbers, from "
                                       : "a list of whole numbers from ",
                      number_text(rule.low), " to ", number_text(rule.high));
    std::string text = is_real(field)              ? "a number"
                       : is_optional_number(field) ? "\"auto\", or a whole number"
                                                   : "a whole number";
    const bool has_high = rule.high < infinity;
    if (!rule.above_low && has_high)
        return text + " from " + number_text(rule.low) + " to " + number_text(rule.high);
    text += (rule.above_low ? " greater than " : " of at least ") + number_text(rule.low);
    if (has_high) text += " and at most " + number_text(rule.high);
    return text;
}

}  // namespace train_gpt
