// Finds added tokens in a text.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tokenizer/formats.h"

namespace train_gpt {

/// Finds a set of added tokens in a text. Immutable: any number of threads may use it.
class TokenFinder {
  public:
    /// No token may be empty. The finder refers to the tokens, so they must outlive it.
    explicit TokenFinder(std::vector<const AddedToken*> tokens) : tokens_(std::move(tokens)) {
        std::sort(tokens_.begin(), tokens_.end(),
                  [](auto* a, auto* b) { return a->text < b->text; });
        for (const AddedToken* token : tokens_) {
            starts_[static_cast<uint8_t>(token->text[0])] = true;
            if (!token->special) all_special_ = false;
        }
    }

    /// Calls plain(text) for the stretches without a token and found(token) for the tokens, in
    /// order. Takes the leftmost token; of those that start at the same place, the longest. Without
    /// `with_special`, a special token still hides other tokens inside it, but its text stays part
    /// of the stretch. Linear in the text: the work at each place is bounded by the longest token.
    template <class Plain, class Found>
    void split(std::string_view text, bool with_special, Plain&& plain, Found&& found) const {
        const bool nothing_to_find = tokens_.empty() || (all_special_ && !with_special);
        size_t begin = 0;
        for (size_t at = nothing_to_find ? text.size() : 0; at < text.size();) {
            const AddedToken* token = token_at(text, at);
            const size_t end = at + (token ? token->text.size() : 1);
            if (token && (with_special || !token->special)) {
                if (at > begin) plain(text.substr(begin, at - begin));
                found(*token);
                begin = end;
            }
            at = end;
        }
        if (begin < text.size()) plain(text.substr(begin));
    }

  private:
    /// The longest token that starts at `at`, or null. Each further byte of the text narrows the
    /// range of tokens with this prefix.
    const AddedToken* token_at(std::string_view text, size_t at) const {
        if (!starts_[static_cast<uint8_t>(text[at])]) return nullptr;
        const AddedToken* longest = nullptr;
        auto first = tokens_.begin(), last = tokens_.end();
        for (size_t length = 0; first != last;) {
            if ((*first)->text.size() == length) {  // the shortest of a range comes first
                longest = *first++;
                continue;
            }
            if (at + length == text.size()) break;
            const uint8_t byte = static_cast<uint8_t>(text[at + length]);
            const auto byte_of = [length](const AddedToken* token) {
                return static_cast<uint8_t>(token->text[length]);
            };
            first = std::partition_point(first, last, [&](auto* t) { return byte_of(t) < byte; });
            last = std::partition_point(first, last, [&](auto* t) { return byte_of(t) == byte; });
            ++length;
        }
        return longest;
    }

    std::vector<const AddedToken*> tokens_;  // sorted by their bytes
    std::array<bool, 256> starts_{};         // the first bytes of all tokens
    bool all_special_ = true;
};

}  // namespace train_gpt
