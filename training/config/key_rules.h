// The rules that the rows of the table of keys are written with (config_keys.cpp, model_keys.cpp).
#pragma once
#include <initializer_list>
#include <string_view>

#include "training/config/config_keys.h"

/// A key's path in the JSON file is its path in the struct.
#define TRAIN_GPT_KEY(member) #member, [](Config & config) -> KeyField { return &config.member; }

namespace train_gpt {

constexpr KeyRule between(double low, double high) { return {.low = low, .high = high}; }
constexpr KeyRule at_least(double low) { return {.low = low}; }
constexpr KeyRule greater_than(double low) { return {.low = low, .above_low = true}; }
constexpr KeyRule above_up_to(double low, double high) {
    return {.low = low, .high = high, .above_low = true};
}
inline constexpr KeyRule one_of(std::initializer_list<std::string_view> words) {
    KeyRule rule;
    for (const std::string_view word : words) rule.word_list[rule.word_count++] = word;
    return rule;
}
/// The words that a OneOf accepts.
template <class Value>
constexpr KeyRule one_of() {
    KeyRule rule;
    for (const Word<Value>& known : WordsOf<Value>::list)
        rule.word_list[rule.word_count++] = known.word;
    return rule;
}
constexpr KeyRule any_text() { return {}; }
constexpr KeyRule any_path() { return {.is_path = true}; }

/// The rows of the section `model`.
std::span<const ConfigKey> model_keys();

}  // namespace train_gpt
