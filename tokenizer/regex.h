// Regular expressions as tokenizer files write them, matched by PCRE2.
#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace train_gpt {

/// A pattern in the syntax of Oniguruma for Ruby, the engine of Hugging Face's tokenizers. It is
/// rewritten for PCRE2 where the two differ: \s (without U+180E), \w and \b (marks are part of words), \h, \v, (?m), the repetitions
/// X{n,m}+ (of X{n,m}), X{n}? (X{n} or nothing) and X{,m}, and $ and ^ at every line. Sets within
/// sets, && and [:names:] in sets, absent groups, the options besides i and m, and \G are refused.
/// With (?i), a letter does not match several that it folds to (ß and ss). Immutable: any number of
/// threads may use it.
class Regex {
  public:
    /// Throws Error that says what is wrong with the pattern.
    explicit Regex(std::string_view pattern);

    const std::string& pattern() const { return pattern_; }

  private:
    friend class RegexMatcher;
    std::string pattern_;
    std::shared_ptr<const void> code_;
};

/// A literal text as a pattern.
std::string escape_regex(std::string_view text);

/// The memory that matching needs, which grows with the longest match. One per thread, for any
/// number of patterns.
class RegexMatcher {
  public:
    RegexMatcher();
    RegexMatcher(RegexMatcher&&) noexcept;
    RegexMatcher& operator=(RegexMatcher&&) noexcept;
    ~RegexMatcher();

    struct Match {
        size_t begin, end;  // in bytes
    };
    /// The leftmost match that begins at or after `from`; lookbehinds see what comes before. `text`
    /// must be well-formed UTF-8. Throws Error if the pattern takes too many steps on this text.
    std::optional<Match> find(const Regex& regex, std::string_view text, size_t from);

  private:
    struct Memory;
    std::unique_ptr<Memory> memory_;
};

}  // namespace train_gpt
