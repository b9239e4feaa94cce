// Rewrites a pattern so that what it says about characters is decided here, not by PCRE2.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt {

/// A pattern over symbols: bytes that stand for characters. Characters that no set of the pattern
/// tells apart share a symbol, so that matching needs neither Unicode nor large sets.
struct RegexTranslation {
    std::string pattern;           // for PCRE2 without its options for Unicode
    std::vector<uint8_t> symbols;  // of each code point
};

/// Translates a pattern in the syntax of Oniguruma for Ruby. Throws Error that says what is wrong
/// with it, or what is not supported.
RegexTranslation translate_regex(std::string_view pattern);

}  // namespace train_gpt
