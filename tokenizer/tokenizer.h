// Byte-level BPE: text to token ids and back.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/pretokenize.h"

namespace train_gpt {

struct TokenizerDefinition;
class WordCounts;

/// How a vocabulary is trained.
struct TrainOptions {
    Pattern pattern = Pattern::gpt2;
    uint64_t min_frequency = 1;  // a pair must occur this often to become a token
};

/// A vocabulary with everything needed to encode and decode. Immutable, cheap to copy (copies share
/// the vocabulary), and safe to use from any number of threads.
///
/// Any bytes are text: decode(encode(x)) == x, even for invalid UTF-8, whose stray bytes count as
/// characters (see first_piece). The exceptions are vocabularies with add_prefix_space, which
/// puts a space before a text that does not start with one, as its model expects, and with a
/// normalizer: they give the text in normalisation form C.
class Tokenizer {
  public:
    /// Reads a vocabulary. path: a tokenizer.json; a *.tiktoken rank file; or a folder with
    /// tokenizer.json, or vocab.json (encoder.json) and merges.txt (vocab.bpe), or one *.tiktoken
    /// file.
    ///
    /// For tokenizer.json, BPE models with a ByteLevel pre-tokenizer are supported, after any
    /// patterns that cut text (Split, Digits; see Regex), and the normalizer NFC. Truncation and
    /// padding are ignored: Hugging Face's encode(text, add_special_tokens=False) gives the same
    /// ids. Which tokens begin and end a document is read from the post-processor and from
    /// tokenizer_config.json beside the file. Rank files are recognised by name: o200k*, cl100k*,
    /// r50k*, p50k*, gpt2*; they get the special tokens that tiktoken publishes. Throws Error that
    /// names the file and what is missing, malformed or not supported.
    static Tokenizer load(const std::filesystem::path& path);

    /// Trains a vocabulary on the words of a corpus: 256 bytes, merges, and the special token
    /// <|endoftext|> with the last id; at most vocab_size tokens in all, fewer when the words have
    /// no more pairs. Hugging Face's BpeTrainer learns the same merges (see learn_merges). A pair
    /// must occur min_frequency times to become a token. Throws Error unless 257 <= vocab_size <=
    /// 2^22.
    static Tokenizer train(const WordCounts& counts, uint32_t vocab_size,
                           uint64_t min_frequency = 1);

    /// The same on documents; no merge crosses from one document to the next.
    static Tokenizer train(std::span<const std::string_view> texts, uint32_t vocab_size,
                           const TrainOptions& options = {});

    /// Special tokens in the text are treated as ordinary text. (Added tokens that are not special
    /// are still recognised, as by Hugging Face's tokenizers with encode_special_tokens.)
    std::vector<uint32_t> encode(std::string_view text) const;

    /// Special tokens in the text become their ids; of those that start at the same place, the
    /// longest is taken.
    std::vector<uint32_t> encode_with_special(std::string_view text) const;

    /// The bytes of the tokens, one after another; they need not be valid UTF-8. Throws Error for
    /// an id that is not below vocab_size().
    std::string decode(std::span<const uint32_t> ids) const;

    /// The bytes of one token; for a special token, its text. Empty for an unused id below
    /// vocab_size(). Throws Error like decode. Valid as long as this tokenizer or a copy of it.
    std::string_view token_bytes(uint32_t id) const;

    /// Whether an id is a special token. False for unused and too large ids.
    bool is_special(uint32_t id) const;

    /// Whether both give every id the same bytes.
    bool has_tokens_of(const Tokenizer& other) const;

    /// One more than the largest id.
    uint32_t vocab_size() const;

    /// The token that ends a document: the one that the files name, else <|endoftext|> or
    /// <|end_of_text|>, if the vocabulary has one.
    std::optional<uint32_t> end_of_text() const;

    /// The token that begins a document, such as <|begin_of_text|>, if the files say that one does.
    std::optional<uint32_t> begin_of_text() const;

    /// The token from which a model sees a new document: begin_of_text(), else end_of_text(), which
    /// ends the one before.
    std::optional<uint32_t> document_boundary() const;

    /// This tokenizer with other tokens for the beginning and the end of documents, named by their
    /// text; empty: as it is, "none": no token at the beginning. Throws Error if it has no such
    /// added token.
    Tokenizer with_document_tokens(const std::string& begin, const std::string& end) const;

    /// The tokens of a text that begins a document: begin_of_text(), if there is one, and the
    /// text's. Never empty: end_of_text(), or token 0, stands for nothing.
    std::vector<uint32_t> encode_beginning(std::string_view text) const;

    /// How this vocabulary cuts text before merging (see Splitter).
    const std::vector<std::string>& patterns() const;

    /// The vocabulary as Hugging Face's tokenizer.json, which gives the same ids there.
    std::string to_json() const;
    void save(const std::filesystem::path& tokenizer_json) const;

  private:
    friend class Encoder;
    explicit Tokenizer(TokenizerDefinition definition);
    struct State;
    std::shared_ptr<const State> state_;
};

/// Encodes many texts like Tokenizer::encode, but faster: it keeps its scratch memory and a bounded
/// cache of pieces (1 MiB) from one text to the next. One per thread. It shares the vocabulary with
/// the tokenizer, which need not outlive it.
class Encoder {
  public:
    explicit Encoder(const Tokenizer& tokenizer);
    Encoder(Encoder&&) noexcept;
    Encoder& operator=(Encoder&&) noexcept;
    ~Encoder();

    /// Appends the tokens of a text to `ids`.
    void encode(std::string_view text, std::vector<uint32_t>& ids);

  private:
    friend struct Tokenizer::State;
    struct Scratch;
    std::shared_ptr<const Tokenizer::State> state_;
    std::unique_ptr<Scratch> scratch_;
};

}  // namespace train_gpt
