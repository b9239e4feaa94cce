// The runs of a sweep: every combination of the values of the keys that it varies, with every seed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace train_gpt {

/// A key of the configuration, and the values that a sweep gives it.
struct VariedKey {
    std::string key;
    /// As JSON, each written as the configuration prints it: 2e-3 and 0.002 are the same value.
    /// Numbers are in ascending order, other values as they were given.
    std::vector<std::string> values;
    bool is_number = false;  // so values have neighbours, and a smallest and a largest one
};

/// Parses the arguments of --vary. Each value is checked by its key's own rule, on its own. Throws
/// Error, which names the argument, as --set does; also for a key or a value that comes twice, and
/// for keys that a sweep sets itself.
std::vector<VariedKey> varied_keys(const std::vector<std::string>& arguments);

/// The overrides "section.key=value" of each combination; the last key's values change fastest. One
/// combination without overrides if no key is varied.
struct Combination {
    std::vector<std::string> values;  // of each varied key
    std::vector<std::string> overrides;
};
std::vector<Combination> combinations_of(const std::vector<VariedKey>& keys);

/// The name of a run, and of its folder: "optimizer.learning_rate=0.002,seed=1337". It depends on
/// the combination and the seed alone, so that a sweep with more values finds the runs that it has.
/// Characters that are unusual in names become "_"; such a name ends in a hash.
std::string run_name(const std::vector<VariedKey>& keys, const Combination& combination,
                     uint64_t seed);

/// "optimizer.learning_rate = 0.002, optimizer.name = muon"; "the configuration" without keys.
std::string describe(const std::vector<VariedKey>& keys, const std::vector<std::string>& values);

/// A value without the quotes of a JSON string.
std::string plain_value(const std::string& json);

}  // namespace train_gpt
