// Cuts text into the pieces within which byte pairs are merged, as a tokenizer's patterns say.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tokenizer/pretokenize.h"
#include "tokenizer/regex.h"

namespace train_gpt {

/// Cuts text by patterns, one after another: each cuts the pieces of the one before as if each
/// piece were a text. The matches of a pattern are pieces, and so is what lies between them.
/// Patterns of tokenizer/pretokenize.h are cut by its functions, others by PCRE2. Immutable: any
/// number of threads may use it.
class Splitter {
  public:
    /// The patterns are regular expressions. Throws Error that says which is wrong, and why.
    explicit Splitter(const std::vector<std::string>& patterns);

    /// Memory that is used again from text to text; one per thread.
    struct Scratch {
        std::vector<RegexMatcher> matchers;  // of each step
    };

    /// Calls piece(at, length) for all pieces of the text, in order. A byte that is not UTF-8
    /// counts as the character U+FFFD. Throws Error like RegexMatcher::next().
    template <class Piece>
    void split(std::string_view text, Scratch& scratch, Piece&& piece) const {
        if (!only_known_) {
            scratch.matchers.resize(steps_.size());
            return split_further(0, text, 0, text.size(), scratch, piece);
        }
        for (size_t at = 0; at < text.size();) {
            const size_t length = first_piece(*only_known_, text.substr(at));
            piece(at, length);
            at += length;
        }
    }

  private:
    using Visit = std::function<void(size_t at, size_t length)>;
    void split_further(size_t step, std::string_view text, size_t begin, size_t end,
                       Scratch& scratch, const Visit& piece) const;

    std::vector<std::variant<Pattern, Regex>> steps_;
    std::optional<Pattern> only_known_;  // if it is the only step
};

}  // namespace train_gpt
