// Which tokens begin, end and pad texts, as the files of a Hugging Face model say it.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace train_gpt {

struct TokenIds {
    std::string config = "{}";    // a JSON object: the *_token_id of config.json, as they are there
    std::string generation = {};  // all of generation_config.json; empty: there is none
};

/// From a model's folder. Ids outside of the vocabulary are kept, too. Throws Error for an entry that
/// is neither an id, a list of ids nor null.
TokenIds read_token_ids(const std::filesystem::path& directory);

/// Of a model without such files, whose texts a tokenizer encodes; null: unknown.
TokenIds token_ids_of(const Tokenizer* tokenizer);

/// Of a model whose texts another tokenizer than `theirs` (null: unknown) encodes from now on: kept
/// where both have the same tokens, with the token that ends a document among those that end a text;
/// else those of the tokenizer.
TokenIds adapt_token_ids(const TokenIds& ids, const Tokenizer* theirs, const Tokenizer& tokenizer);

/// The tokens of which each ends a text, in both files; each once.
std::vector<int64_t> ends_of_text(const TokenIds& ids);

}  // namespace train_gpt
