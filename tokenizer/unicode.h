// What Unicode says about characters, as Hugging Face's tokenizers know it.
//
// Own tables instead of a library's: a text must have the same tokens on every machine, whichever
// versions of libraries it has. The tables are asked from tokenizers itself
// (scripts/unicode_tables.py). Patterns know Unicode 16.0, normalisation 9.0.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "tokenizer/code_points.h"

namespace train_gpt {

/// The characters of a property as patterns write it between \p{ and }: a general category, a
/// script, a binary property or a block (In_…). Letter case, spaces, - and _ in names do not count.
std::optional<CodePoints> unicode_property(std::string_view name);

/// The characters of a class that sets write as [:name:].
std::optional<CodePoints> posix_class(std::string_view name);

/// What \w and \b take for words: unlike in sets, ²³¹¼½¾ as well.
const CodePoints& word_characters();

/// The set and all characters that differ from one of its characters in letter case only.
CodePoints with_other_case(const CodePoints& set);

/// The first of the characters that differ from this one in letter case only.
char32_t without_case(char32_t letter);

/// Characters that stand for several without regard to letter case: ß for ss.
struct LongFold {
    char32_t from;
    char32_t to[3];  // ends with 0 if there are two
    std::u32string_view letters() const { return {to, to[2] ? size_t{3} : size_t{2}}; }
};
std::span<const LongFold> unicode_long_folds();

/// The characters that form C composes, decomposes or reorders. It leaves all others where they
/// are.
const CodePoints& changed_by_nfc();

// The tables. Runs of code points are outside and inside of a set in turn; a group of letters that
// differ in case ends with 0.
struct NamedRuns {
    std::string_view name;
    std::span<const uint32_t> runs;
};
std::span<const NamedRuns> unicode_property_table();
std::span<const char32_t> unicode_case_groups();
std::span<const uint32_t> unicode_nfc_runs();

}  // namespace train_gpt
