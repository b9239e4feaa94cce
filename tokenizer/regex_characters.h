// The parts of a pattern that stand for one character: literals, escapes, properties and sets.
#pragma once
#include <optional>
#include <string_view>

#include "base/error.h"
#include "tokenizer/code_points.h"

namespace train_gpt {

/// A place in a pattern.
struct PatternCursor {
    std::string_view pattern;
    size_t at = 0;

    bool at_end() const { return at >= pattern.size(); }
    char next(size_t ahead = 0) const {
        return at + ahead < pattern.size() ? pattern[at + ahead] : '\0';
    }
};

/// The error for what no pattern may use.
Error refuse_in_pattern(std::string_view what);

bool is_decimal_digit(char c);

/// Reads \p{…}, \P{…}, \w, \W, \d, \D, \s, \S, \h or \H if it is next. Within sets, some of them
/// mean other characters.
std::optional<CodePoints> read_class(PatternCursor& cursor, bool in_set);

/// Reads a character, written as itself or by an escape. Throws Error for other escapes.
char32_t read_character(PatternCursor& cursor, bool in_set);

/// A set as written: [members] or [^members].
struct PatternSet {
    CodePoints members;
    bool negated;
};

/// Reads the set that is next.
PatternSet read_set(PatternCursor& cursor);

}  // namespace train_gpt
