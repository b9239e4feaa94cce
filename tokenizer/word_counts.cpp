#include "tokenizer/word_counts.h"

#include <utility>

#include "base/error.h"

namespace train_gpt {

void WordCounts::add(std::string_view text) {
    for (size_t at = 0; at < text.size();) {
        const size_t length = first_piece(pattern_, text.substr(at));
        if (length <= PieceKey::longest)
            add_short(PieceKey::of(text, at, length), 1);
        else
            add_long(text.substr(at, length), 1);
        at += length;
    }
}

void WordCounts::merge(WordCounts&& other) {
    if (other.pattern_ != pattern_)
        throw Error("words cut by the pattern ", pattern_name(other.pattern_),
                    " cannot be counted with words cut by the pattern ", pattern_name(pattern_),
                    "; count both with the same pattern");
    if (other.size() > size()) std::swap(*this, other);
    for (const ShortWord& word : other.short_words_)
        if (word.count > 0) add_short(word.piece, word.count);
    for (const auto& [piece, count] : other.long_words_) add_long(piece, count);
    other = WordCounts(pattern_);
}

void WordCounts::add_short(const PieceKey& piece, uint64_t count) {
    if (2 * short_pieces_ >= short_words_.size()) {
        std::vector<ShortWord> old(short_words_.empty() ? 1024 : 2 * short_words_.size());
        old.swap(short_words_);
        short_pieces_ = 0;
        for (const ShortWord& word : old)
            if (word.count > 0) add_short(word.piece, word.count);
    }
    for (size_t slot = piece.hash();; ++slot) {
        ShortWord& word = short_words_[slot & (short_words_.size() - 1)];
        if (word.count == 0) {
            word.piece = piece;
            ++short_pieces_;
        }
        if (word.piece != piece) continue;
        word.count += count;
        return;
    }
}

void WordCounts::add_long(std::string_view piece, uint64_t count) {
    if (const auto known = long_words_.find(piece); known != long_words_.end())
        known->second += count;
    else
        long_words_.emplace(piece, count);
}

}  // namespace train_gpt
