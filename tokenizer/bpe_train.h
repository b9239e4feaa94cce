// Learns merges from the words of a corpus.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "tokenizer/bpe.h"
#include "tokenizer/word_counts.h"

namespace train_gpt {

/// Tokens by id, and the merges, in order of rank, that produce all but the 256 single bytes.
struct LearntMerges {
    std::vector<std::string> tokens;
    std::vector<Merge> merges;
};

/// Byte-pair training (Sennrich et al. 2016, Algorithm 1) on pieces and the number of times each
/// occurs. Each step merges the most frequent adjacent pair of tokens (among equal counts, the one
/// with the smallest (left id, right id)), until there are `vocab_size` tokens or no pair occurs
/// `min_frequency` times. Ids 0..255 are the bytes in GPT-2's order (see byte_alphabet.h). The
/// result depends only on the pieces and their counts.
///
/// These are the merges of Hugging Face's BpeTrainer with initial_alphabet = ByteLevel.alphabet(),
/// in the same order.
LearntMerges learn_merges(const WordCounts& counts, uint32_t vocab_size, uint64_t min_frequency);

}  // namespace train_gpt
