// Which tokens begin, end and pad texts, in the form of a Hugging Face model's files.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace train_gpt {

struct TokenIds {
    std::string config = "{}";    // a JSON object: the *_token_id entries of config.json, unchanged
    std::string generation = {};  // all of generation_config.json; empty: there is none
};

/// Reads the ids of tokens from a model's folder. Ids outside of the vocabulary are kept, too.
/// Throws Error for an entry that is neither an id, a list of ids nor null.
TokenIds read_token_ids(const std::filesystem::path& directory);

/// The ids of tokens for a model without such files, from the tokenizer that encodes its texts.
/// Null: the tokenizer is unknown.
TokenIds token_ids_of(const Tokenizer* tokenizer);

/// Adapts a model's ids of tokens to a tokenizer that encodes its texts from now on. `theirs`: the
/// model's tokenizer so far; null: unknown. If the two tokenizers have different tokens, returns
/// the ids of the new tokenizer. Else returns `ids`, and adds the token that ends a document to the
/// tokens that end a text.
TokenIds adapt_token_ids(const TokenIds& ids, const Tokenizer* theirs, const Tokenizer& tokenizer);

/// All tokens that end a text, according to both files; each once.
std::vector<int64_t> ends_of_text(const TokenIds& ids);

}  // namespace train_gpt
