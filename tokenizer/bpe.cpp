#include "tokenizer/bpe.h"

#include <bit>

namespace train_gpt {

BytePairEncoder::BytePairEncoder(std::span<const std::string> tokens, std::span<const Merge> merges,
                                 bool whole_pieces) {
    for (uint32_t id = 0; id < tokens.size(); ++id)
        if (tokens[id].size() == 1) byte_ids_[static_cast<uint8_t>(tokens[id][0])] = id;

    pairs_.resize(std::bit_ceil(2 * merges.size() + 2));
    slot_shift_ = 64 - std::countr_zero(pairs_.size());
    for (uint32_t rank = 0; rank < merges.size(); ++rank) {
        const Merge& merge = merges[rank];
        size_t slot = slot_of(merge.left, merge.right);
        while (pairs_[slot].merge.rank != RankedMerge::none)
            slot = (slot + 1) & (pairs_.size() - 1);
        pairs_[slot] = {merge.left, merge.right, {rank, merge.result}};
    }

    PieceMerger merger;
    whole_tokens_.resize(std::bit_ceil(2 * tokens.size() + 2));
    for (uint32_t id = 0; id < tokens.size(); ++id) {
        const std::string_view token = tokens[id];
        if (token.empty()) continue;
        if (!whole_pieces && merge_bytes(token, merger).size() > 1) continue;
        if (token.size() > PieceKey::longest) {
            long_tokens_.emplace(token, id);
            continue;
        }
        const PieceKey key = PieceKey::of(token, 0, token.size());
        size_t slot = key.hash() & (whole_tokens_.size() - 1);
        while (whole_tokens_[slot].key != PieceKey{})
            slot = (slot + 1) & (whole_tokens_.size() - 1);
        whole_tokens_[slot] = {key, id};
    }
}

std::span<const uint32_t> BytePairEncoder::merge_bytes(std::string_view bytes,
                                                       PieceMerger& merger) const {
    return merger.merge(
        bytes, [this](uint8_t byte) { return byte_ids_[byte]; },
        [this](uint32_t left, uint32_t right) { return find(left, right); });
}

std::span<const uint32_t> BytePairEncoder::encode_piece(std::string_view piece,
                                                        PieceMerger& merger) const {
    if (piece.size() <= PieceKey::longest) {
        if (const uint32_t* whole = find_whole(PieceKey::of(piece, 0, piece.size())))
            return {whole, 1};
    } else if (const auto whole = long_tokens_.find(piece); whole != long_tokens_.end()) {
        return {&whole->second, 1};
    }
    return merge_bytes(piece, merger);
}

}  // namespace train_gpt
