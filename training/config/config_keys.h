// The table of the configuration's keys. Parser, checks, output, help and schema are made from it.
// A new key is a member of Config, with its default, and a row of this table.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/json_text.h"
#include "training/config/config.h"

namespace train_gpt {

/// The address of a key's value in a Config. The pointer's type is the key's type.
using TrainSources = std::vector<Config::Data::Source>;
using WholeNumbers = std::vector<int>;
using Texts = std::vector<std::string>;
using KeyField =
    std::variant<int*, std::optional<int>*, int64_t*, uint64_t*, double*, bool*, std::string*,
                 TrainSources*, WholeNumbers*, Texts*, OneOf<PipelineKind>*, OneOf<Decay>*,
                 OneOf<std::optional<GradientSums>>*, OneOf<OnSpike>*, OneOf<OptimizerName>*,
                 OneOf<NewtonSchulzList>*, OneOf<MuonScale>*, OneOf<DType>*,
                 OneOf<std::optional<DType>>*, OneOf<std::optional<Recompute>>*, OneOf<bool>*,
                 OneOf<ProgressStyle>*, OneOf<std::optional<Norm>>*, OneOf<std::optional<Mlp>>*,
                 OneOf<std::optional<Biases>>*, OneOf<std::optional<QkNormKind>>*,
                 OneOf<std::optional<RouterScore>>*, OneOf<Balance>*, OneOf<BalanceLevel>*,
                 OneOf<std::optional<bool>>*, OneOf<std::optional<Positions>>*, OneOf<RopeScaling>*,
                 OneOf<KernelSettings::Gemm>*, OneOf<KernelSettings::Attention>*>;

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
