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
    whole_tokens_.reserve(tokens.size());
    for (uint32_t id = 0; id < tokens.size(); ++id) {
        if (tokens[id].empty()) continue;
        if (whole_pieces || merge_bytes(tokens[id], merger).size() == 1)
            whole_tokens_.emplace(tokens[id], id);
    }
}

std::span<const uint32_t> BytePairEncoder::merge_bytes(std::string_view bytes,
                                                       PieceMerger& merger) const {
    return merger.merge(
        bytes, [this](uint8_t byte) { return byte_ids_[byte]; },
        [this](uint32_t left, uint32_t right) { return find(left, right); });
}

void BytePairEncoder::encode_piece(std::string_view piece, PieceMerger& merger,
                                   std::vector<uint32_t>& out) const {
    if (const auto whole = whole_tokens_.find(piece); whole != whole_tokens_.end()) {
        out.push_back(whole->second);
        return;
    }
    const auto ids = merge_bytes(piece, merger);
    out.insert(out.end(), ids.begin(), ids.end());
}

}  // namespace train_gpt
