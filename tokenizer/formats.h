// Vocabulary files: what defines a tokenizer, and the supported file formats.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "tokenizer/bpe.h"
#include "tokenizer/pretokenize.h"

namespace train_gpt {

/// A token that is not merged from bytes but recognised verbatim in the text, such as
/// <|endoftext|>.
struct AddedToken {
    uint32_t id = 0;
    std::string text;
    bool special = true;      // recognised only when special tokens are asked for
    bool normalized = false;  // recognised only in what tokens without this flag leave over
};

/// Everything that defines a byte-level BPE tokenizer.
struct TokenizerDefinition {
    std::vector<std::string> tokens;  // bytes by id; empty for an unused id or an added token
    std::vector<Merge> merges;        // by rank
    std::vector<AddedToken> added;
    // How text is cut before merging (see Splitter).
    std::vector<std::string> patterns{regex_of(Pattern::gpt2)};
    bool nfc = false;               // text is brought into normalisation form C
    bool whole_pieces = false;      // a piece that is a token is not merged ("ignore_merges")
    bool add_prefix_space = false;  // a text that does not start with a space gets one
    std::optional<uint32_t> begin;  // the token that begins a document, if there is one
    // The token that ends a document, if the files say; else usual_end() is used.
    std::optional<uint32_t> end;
};

/// The added token <|endoftext|>, else <|end_of_text|>, if there is one.
std::optional<uint32_t> usual_end(const TokenizerDefinition& definition);

/// The id of an added token.
std::optional<uint32_t> find_added(const TokenizerDefinition& definition, std::string_view text);

/// Ids are small numbers; a larger one means that the file is damaged.
inline constexpr uint32_t max_vocab_size = 1u << 22;
inline constexpr uint32_t min_trained_vocab = 257;  // the 256 bytes and <|endoftext|>

/// Throws Error unless all 256 single bytes are tokens and no two tokens have the same bytes.
void check_tokens(const TokenizerDefinition& definition, const std::filesystem::path& file);

/// No vocabulary file is larger than this. A larger file is something else and is not read.
inline constexpr uintmax_t max_vocabulary_bytes = uintmax_t{1} << 28;
MappedFile map_vocabulary(const std::filesystem::path& file);

/// Whether read_tokenizer finds all the files of a tokenizer here.
bool has_tokenizer(const std::filesystem::path& path);

/// Reads a tokenizer.json, a folder or a *.tiktoken file, and tokenizer_config.json beside it (see
/// Tokenizer::load). Throws Error that names the file.
TokenizerDefinition read_tokenizer(const std::filesystem::path& path);

/// Reads Hugging Face's tokenizer.json (huggingface_json.cpp).
TokenizerDefinition read_tokenizer_json(const std::filesystem::path& file);

/// Reads GPT-2's pair of files: vocab.json or encoder.json, and merges.txt or vocab.bpe
/// (huggingface_json.cpp).
TokenizerDefinition read_vocab_and_merges(const std::filesystem::path& vocab,
                                          const std::filesystem::path& merges);

/// Reads which tokens begin and end a document from Hugging Face's tokenizer_config.json
/// (huggingface_json.cpp): eos_token ends it; bos_token begins it if add_bos_token is true, and
/// nothing does if that is false. Tokens that are not in the vocabulary are passed over.
void read_tokenizer_config(const std::filesystem::path& file, TokenizerDefinition& definition);

/// Reads a tiktoken rank file (tiktoken.cpp). Such files do not contain the pattern and the special
/// tokens; these follow from the name, as tiktoken publishes them: o200k*, cl100k*, r50k*, p50k* or
/// gpt2*.
TokenizerDefinition read_tiktoken(const std::filesystem::path& file);

/// The contents of a tokenizer.json. If a token begins documents, or another than the usual one
/// ends them, its post-processor says so: it puts the former before a text, and both between the
/// two texts of a pair. Added tokens are also written to the vocabulary, because Hugging Face's
/// reader assigns its own ids to those that are not in it.
std::string write_tokenizer_json(const TokenizerDefinition& definition);

}  // namespace train_gpt
