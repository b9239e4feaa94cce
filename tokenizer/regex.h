// Regular expressions as tokenizer files write them, matched by PCRE2.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt {

/// A pattern in the syntax of Oniguruma for Ruby, the engine of Hugging Face's tokenizers, with the
/// meaning that it has there. PCRE2 matches it, but over symbols: which characters a property, a
/// set or (?i) stands for is decided by our own tables (tokenizer/unicode.h), so that the matches
/// do not depend on PCRE2's version of Unicode. Rewritten are also (?m), (?i) in front of
/// alternatives, the repetitions X{n,m}+ (of X{n,m}), X{n}? (X{n} or nothing) and X{,m}. ^ and $
/// match at every line. Refused are references to groups, \G, \X, absent groups, the options
/// besides i and m, and patterns that tell more than 256 kinds of characters apart. Immutable: any
/// number of threads may use it.
class Regex {
  public:
    /// Throws Error that says what is wrong with the pattern.
    explicit Regex(std::string_view pattern);

    const std::string& pattern() const { return pattern_; }

  private:
    friend class RegexMatcher;
    std::string pattern_;
    struct Compiled;
    std::shared_ptr<const Compiled> compiled_;
};

/// A literal text as a pattern.
std::string escape_regex(std::string_view text);

/// Finds the successive matches of a pattern in a text. Its memory grows with the longest text, and
/// is used again from text to text.
class RegexMatcher {
  public:
    RegexMatcher();
    RegexMatcher(RegexMatcher&&) noexcept;
    RegexMatcher& operator=(RegexMatcher&&) noexcept;
    ~RegexMatcher();

    struct Match {
        size_t begin, end;  // in bytes
    };
    /// Begins with a text, which must remain until the last call of next(), as must the pattern.
    void begin(const Regex& regex, std::string_view text);
    /// The leftmost match after the last one; lookbehinds see what comes before. An empty match
    /// where the last one ended is left out. A byte that is not UTF-8 counts as U+FFFD. Throws
    /// Error if the pattern takes too many steps on this text.
    std::optional<Match> next();

  private:
    struct Memory;
    bool search(size_t from, size_t& begin, size_t& end);
    /// The byte at which a symbol begins; symbols are asked for in order.
    size_t byte_of(size_t symbol);

    std::unique_ptr<Memory> memory_;
    const Regex* regex_ = nullptr;
    std::string_view text_;
    std::vector<uint8_t> symbols_;    // of the characters of the text
    size_t from_ = 0;                 // the symbol at which the next search begins,
    std::optional<size_t> last_end_;  // and where the last match ended
    size_t symbol_ = 0, byte_ = 0;    // a symbol and the byte where it begins
};

}  // namespace train_gpt
