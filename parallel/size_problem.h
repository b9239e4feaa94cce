// What is wrong with the size of an axis.
#pragma once
#include <cstdint>
#include <string>

namespace train_gpt {

/// Why the ranks of an axis cannot share something, in the words of the configuration's keys, and
/// the key whose value to change. training/config/config_checks.cpp tries other values, and
/// suggests the nearest one that fits all other keys, too.
struct SizeProblem {
    std::string text;
    std::string key = {};         // empty: the text says what to change
    int64_t value = 0, most = 0;  // the key's value, and the largest value to suggest
    std::string does = "does";    // "the nearest value that … is"
    std::string afterwards = {};  // follows the suggestion
};

}  // namespace train_gpt
