// Byte-pair encoding of one piece: adjacent symbols are merged, the pair of lowest rank first
// (Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units"; on bytes as
// in Radford et al. 2019, GPT-2).
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "tokenizer/piece_key.h"

namespace train_gpt {

/// Two adjacent tokens become one. A merge's rank is its position in a list of merges; lower ranks
/// are applied first.
struct Merge {
    uint32_t left, right, result;
    bool operator==(const Merge&) const = default;
};

/// What a pair of adjacent tokens may become.
struct RankedMerge {
    uint32_t rank = none;
    uint32_t result = none;
    static constexpr uint32_t none = UINT32_MAX;
};

/// Memory for merging pieces one after another without allocating for each. One per thread.
class PieceMerger {
  public:
    /// Merges tokens until no adjacent pair can merge. Each step merges the pair of lowest rank;
    /// among equal ranks, the leftmost. id_of(byte) gives the token of a byte; find(left id, right
    /// id) gives the RankedMerge of a pair, with rank none when it cannot merge. O(n log n) for n
    /// bytes. The result is valid until the next call.
    template <class IdOf, class Find>
    std::span<const uint32_t> merge(std::string_view bytes, IdOf&& id_of, Find&& find);

  private:
    static constexpr uint32_t none = RankedMerge::none;

    /// Up to this many tokens, scanning all pairs for each merge is faster than keeping a queue.
    static constexpr size_t longest_scanned = 48;
    template <class Find>
    void merge_by_scanning(std::vector<uint32_t>& ids, Find&& find);
    template <class Find>
    void merge_by_queue(std::vector<uint32_t>& ids, Find&& find);

    /// A token of the piece, in a linked list of positions. When two tokens merge, the right one
    /// leaves the list.
    struct Symbol {
        uint32_t id, previous, next;
        RankedMerge with_next;
    };
    std::vector<Symbol> symbols_;
    std::vector<uint64_t> queue_;  // min-heap of rank << 32 | position; entries may be out of date
    std::vector<uint32_t> ids_;
};

/// The merges of a vocabulary, ready to encode. Immutable: any number of threads may use it.
class BytePairEncoder {
  public:
    /// tokens: the bytes of each id, empty for an unused id; must include all 256 single bytes. The
    /// encoder refers to them, so they must outlive it.
    /// whole_pieces: a piece that is a token becomes that token, even if merging would not produce
    /// it.
    BytePairEncoder(std::span<const std::string> tokens, std::span<const Merge> merges,
                    bool whole_pieces);

    /// The single token that a short piece becomes, or null. Valid as long as the encoder.
    const uint32_t* find_whole(const PieceKey& key) const {
        for (size_t slot = key.hash();; ++slot) {
            const WholeToken& token = whole_tokens_[slot & (whole_tokens_.size() - 1)];
            if (token.key == key) return &token.id;
            if (token.key == PieceKey{}) return nullptr;
        }
    }

    /// The tokens that the bytes merge into. Valid until the next call with this merger.
    std::span<const uint32_t> merge_bytes(std::string_view bytes, PieceMerger& merger) const;

    /// The tokens of any piece, looked up as a whole or merged. Valid until the next call with this
    /// merger.
    std::span<const uint32_t> encode_piece(std::string_view piece, PieceMerger& merger) const;

    /// What a pair of tokens merges into.
    RankedMerge find(uint32_t left, uint32_t right) const {
        for (size_t slot = slot_of(left, right);; slot = (slot + 1) & (pairs_.size() - 1)) {
            const Pair& pair = pairs_[slot];
            if (pair.left == left && pair.right == right) return pair.merge;
            if (pair.merge.rank == RankedMerge::none) return {};
        }
    }

  private:
    struct Pair {
        uint32_t left = RankedMerge::none, right = RankedMerge::none;
        RankedMerge merge;
    };
    size_t slot_of(uint32_t left, uint32_t right) const {
        const uint64_t mixed =
            (uint64_t{left} << 32 | right) * 0x9E3779B97F4A7C15u;  // Fibonacci hashing
        return static_cast<size_t>(mixed >> slot_shift_);
    }

    std::array<uint32_t, 256> byte_ids_{};
    std::vector<Pair>
        pairs_;  // open addressing; a power of two of slots, at most half of them used
    int slot_shift_ = 0;
    // Pieces that become a single token, as most pieces do. They are found without merging.
    struct WholeToken {
        PieceKey key;  // length 0: an empty slot
        uint32_t id = 0;
    };
    std::vector<WholeToken> whole_tokens_;                        // open addressing like pairs_
    std::unordered_map<std::string_view, uint32_t> long_tokens_;  // tokens too long for a PieceKey
};

template <class IdOf, class Find>
std::span<const uint32_t> PieceMerger::merge(std::string_view bytes, IdOf&& id_of, Find&& find) {
    if (bytes.size() >= none)
        throw Error("4 GiB of text without a word boundary cannot be encoded; split the text");
    ids_.clear();
    for (const char byte : bytes) ids_.push_back(id_of(static_cast<uint8_t>(byte)));
    if (ids_.size() <= longest_scanned)
        merge_by_scanning(ids_, find);
    else
        merge_by_queue(ids_, find);
    return ids_;
}

template <class Find>
void PieceMerger::merge_by_scanning(std::vector<uint32_t>& ids, Find&& find) {
    std::array<RankedMerge, longest_scanned> with_next;  // [i]: of ids[i] and ids[i + 1]
    size_t pairs = ids.empty() ? 0 : ids.size() - 1;
    for (size_t i = 0; i < pairs; ++i) with_next[i] = find(ids[i], ids[i + 1]);
    for (;;) {
        size_t best = pairs;
        uint32_t best_rank = none;
        for (size_t i = 0; i < pairs; ++i) {
            if (with_next[i].rank >= best_rank) continue;
            best_rank = with_next[i].rank;
            best = i;
        }
        if (best == pairs) break;

        ids[best] = with_next[best].result;
        --pairs;
        for (size_t i = best + 1; i <= pairs; ++i) ids[i] = ids[i + 1];
        for (size_t i = best; i < pairs; ++i) with_next[i] = with_next[i + 1];
        if (best < pairs) with_next[best] = find(ids[best], ids[best + 1]);
        if (best > 0) with_next[best - 1] = find(ids[best - 1], ids[best]);
    }
    ids.resize(ids.empty() ? 0 : pairs + 1);
}

template <class Find>
void PieceMerger::merge_by_queue(std::vector<uint32_t>& ids, Find&& find) {
    const uint32_t n = static_cast<uint32_t>(ids.size());
    symbols_.resize(n);
    queue_.clear();
    const auto entry = [this](uint32_t position) {
        return uint64_t{symbols_[position].with_next.rank} << 32 | position;
    };
    for (uint32_t i = 0; i < n; ++i)
        symbols_[i] = {ids[i], i == 0 ? none : i - 1, i + 1 == n ? none : i + 1, {}};
    for (uint32_t i = 0; i + 1 < n; ++i) {
        symbols_[i].with_next = find(symbols_[i].id, symbols_[i + 1].id);
        if (symbols_[i].with_next.rank != none) queue_.push_back(entry(i));
    }
    std::make_heap(queue_.begin(), queue_.end(), std::greater<>{});

    const auto update = [&](uint32_t position) {
        Symbol& symbol = symbols_[position];
        symbol.with_next =
            symbol.next == none ? RankedMerge{} : find(symbol.id, symbols_[symbol.next].id);
        if (symbol.with_next.rank == none) return;
        queue_.push_back(entry(position));
        std::push_heap(queue_.begin(), queue_.end(), std::greater<>{});
    };
    while (!queue_.empty()) {
        const uint64_t top = queue_.front();
        std::pop_heap(queue_.begin(), queue_.end(), std::greater<>{});
        queue_.pop_back();
        const uint32_t position = static_cast<uint32_t>(top);
        if (top != entry(position)) continue;  // the pair has changed since

        Symbol& left = symbols_[position];
        Symbol& right = symbols_[left.next];
        left.id = left.with_next.result;
        left.next = right.next;
        right.with_next = {};
        if (left.next != none) symbols_[left.next].previous = position;
        update(position);
        if (left.previous != none) update(left.previous);
    }

    ids.clear();
    for (uint32_t i = 0; i != none; i = symbols_[i].next) ids.push_back(symbols_[i].id);
}

}  // namespace train_gpt
