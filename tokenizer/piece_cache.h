// Remembers the tokens of pieces: most of a text is the same few thousand words.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "tokenizer/piece_key.h"

namespace train_gpt {

/// The tokens of short pieces seen before, in bounded memory: a new piece replaces the one in its
/// hash slot. The cache starts small, so that short texts are cheap.
class PieceCache {
  public:
    /// The tokens of the piece; empty if it is not in the cache. Valid until the next insert().
    std::span<const uint32_t> find(const PieceKey& key) const {
        const Entry& entry = entries_[place_of(key)];
        if (entry.key != key) return {};
        return {entry.ids.data(), entry.count};
    }

    /// Remembers the tokens of a piece, unless there are too many for an entry.
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
        PieceKey key;  // length 0, which no piece has: an empty entry
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
    size_t inserted_ = 0;  // since the cache last grew
};

}  // namespace train_gpt
