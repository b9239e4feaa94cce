// Remembers the tokens of pieces: most of a text is a few thousand words again and again.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "tokenizer/piece_key.h"

namespace train_gpt {

/// The tokens of short pieces that were met before, in memory that is bounded: a piece takes the
/// place of the one whose hash is like its own. The cache starts small, for the sake of short
/// texts.
class PieceCache {
  public:
    /// Tokens of the piece; none when it is not here. Valid until the next insert().
    std::span<const uint32_t> find(const PieceKey& key) const {
        const Entry& entry = entries_[place_of(key)];
        if (entry.key != key) return {};
        return {entry.ids.data(), entry.count};
    }

    /// Remembers the tokens of a piece, unless they are more than fit into an entry.
    void insert(const PieceKey& key, std::span<const uint32_t> tokens) {
        if (tokens.size() > most_tokens) return;
        if (++inserted_ > entries_.size() && entries_.size() < most_entries) grow();
        Entry& entry = entries_[place_of(key)];
        entry.key = key;
        entry.count = static_cast<uint32_t>(tokens.size());
        std::copy(tokens.begin(), tokens.end(), entry.ids.begin());
    }

  private:
    static constexpr size_t fewest_entries = 64, most_entries = 1 << 14;
    static constexpr size_t most_tokens = 11;
    struct alignas(64) Entry {
        PieceKey key;  // of length 0, which no piece has, where there is none
        uint32_t count = 0;
        std::array<uint32_t, most_tokens> ids{};
    };
    static_assert(sizeof(Entry) == 64, "looking up costs one cache line of the processor");

    size_t place_of(const PieceKey& key) const {
        return static_cast<size_t>(key.hash()) & (entries_.size() - 1);
    }
    void grow() {
        std::vector<Entry> old(entries_.size() * 4);
        old.swap(entries_);
        for (const Entry& entry : old)
            if (entry.count > 0) entries_[place_of(entry.key)] = entry;
        inserted_ = 0;
    }

    std::vector<Entry> entries_ = std::vector<Entry>(fewest_entries);
    size_t inserted_ = 0;  // since the cache grew
};

}  // namespace train_gpt
