// What a row of the table of keys is made of (config_keys.cpp, model_keys.cpp).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "training/config/config.h"

/// A key's path in the JSON file is its path in the struct.
#define TRAIN_GPT_KEY(member) #member, [](Config & config) -> KeyField { return &config.member; }

namespace train_gpt {

using TrainSources = std::vector<Config::Data::Source>;
using WholeNumbers = std::vector<int>;
using Texts = std::vector<std::string>;
/// The address of a key's value in a Config. The pointer's type is the key's type.
using KeyField =
    std::variant<int*, std::optional<int>*, int64_t*, uint64_t*, double*, bool*, std::string*,
                 TrainSources*, WholeNumbers*, Texts*, OneOf<PipelineKind>*, OneOf<Decay>*,
                 OneOf<std::optional<GradientSums>>*, OneOf<OnSpike>*, OneOf<OptimizerName>*,
                 OneOf<NewtonSchulzList>*, OneOf<MuonScale>*, OneOf<StateDType>*, OneOf<DType>*,
                 OneOf<std::optional<DType>>*, OneOf<std::optional<Recompute>>*, OneOf<bool>*,
                 OneOf<ProgressStyle>*, OneOf<std::optional<Norm>>*, OneOf<std::optional<Mlp>>*,
                 OneOf<std::optional<Biases>>*, OneOf<std::optional<QkNormKind>>*,
                 OneOf<std::optional<RouterScore>>*, OneOf<Balance>*, OneOf<BalanceLevel>*,
                 OneOf<std::optional<bool>>*, OneOf<std::optional<Positions>>*, OneOf<RopeScaling>*,
                 OneOf<KernelSettings::Gemm>*, OneOf<KernelSettings::Attention>*,
                 OneOf<Fp8Recipe>*>;

constexpr double infinity = std::numeric_limits<double>::infinity();
/// 2^53: a double holds every integer up to this number.
constexpr double max_exact_integer = 9007199254740992.0;

/// Which values of a key are valid: numbers between two bounds, or one of a few words. Without
/// words, any text is valid.
struct KeyRule {
    double low = -infinity, high = infinity;
    bool above_low = false;  // low itself is not valid
    bool is_path = false;    // a text in which "~" stands for the home folder
    std::array<std::string_view, 10> word_list{};
    size_t word_count = 0;

    std::span<const std::string_view> words() const {
        return std::span(word_list).first(word_count);
    }
    bool allows(double value) const {
        return (above_low ? value > low : value >= low) && value <= high;
    }
};

struct ConfigKey {
    std::string_view path;  // "section.name", or "name" for a key without section
    KeyField (*field)(Config&);
    KeyRule rule;
    std::string_view meaning;  // for people
};

// ---- Rules --------------------------------------------------------------------------------------

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
