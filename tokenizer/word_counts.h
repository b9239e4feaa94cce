// How often each piece occurs, which is all that vocabulary training needs of a corpus.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokenizer/piece_key.h"
#include "tokenizer/pretokenize.h"

namespace train_gpt {

/// The distinct pieces of texts and how often each occurs. Memory is bounded by the number of
/// distinct pieces, not by the corpus. Threads that read a corpus together count separately and
/// then merge.
class WordCounts {
  public:
    explicit WordCounts(Pattern pattern) : pattern_(pattern) {}

    /// Adds the pieces of one document, or of a part of one that is cut between two pieces.
    void add(std::string_view text);

    /// Adds the counts of `other` and leaves it empty. Throws Error unless both have the same
    /// pattern.
    void merge(WordCounts&& other);

    Pattern pattern() const { return pattern_; }

    /// The number of distinct pieces.
    size_t size() const { return short_pieces_ + long_words_.size(); }

    /// Calls visit(piece, count) for every distinct piece, in no particular order.
    template <class Visit>
    void for_each(Visit&& visit) const {
        for (const ShortWord& word : short_words_)
            if (word.count > 0) visit(word.piece.view(), word.count);
        for (const auto& [piece, count] : long_words_) visit(std::string_view(piece), count);
    }

  private:
    struct ShortWord {
        PieceKey piece;
        uint64_t count = 0;
    };
    struct Hash {
        using is_transparent = void;
        size_t operator()(std::string_view piece) const {
            return std::hash<std::string_view>{}(piece);
        }
    };
    void add_short(const PieceKey& piece, uint64_t count);
    void add_long(std::string_view piece, uint64_t count);

    Pattern pattern_;
    std::vector<ShortWord> short_words_;  // open addressing, a power of two of slots
    size_t short_pieces_ = 0;             // slots used, at most half of them
    std::unordered_map<std::string, uint64_t, Hash, std::equal_to<>> long_words_;
};

}  // namespace train_gpt
