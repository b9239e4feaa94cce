#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "tokenizer/bpe.h"
#include "tokenizer/bpe_train.h"
#include "tokenizer/formats.h"
#include "tokenizer/nfc.h"
#include "tokenizer/piece_cache.h"
#include "tokenizer/splitter.h"
#include "tokenizer/token_finder.h"
#include "tokenizer/word_counts.h"

namespace train_gpt {

namespace {

std::vector<const AddedToken*> select(const std::vector<AddedToken>& added, bool normalized) {
    std::vector<const AddedToken*> selected;
    for (const AddedToken& token : added)
        if (token.normalized == normalized) selected.push_back(&token);
    return selected;
}

}  // namespace

/// Memory that encoding reuses from piece to piece.
struct Encoder::Scratch {
    PieceCache cache;
    PieceMerger merger;
    Splitter::Scratch splitting;
    std::string normal, with_space;
};

struct Tokenizer::State {
    using Scratch = Encoder::Scratch;

    explicit State(TokenizerDefinition d)
        : definition(std::move(d)),
          splitter(definition.patterns),
          encoder(definition.tokens, definition.merges, definition.whole_pieces),
          first_finder(select(definition.added, false)),
          second_finder(select(definition.added, true)),
          bytes(definition.tokens.begin(), definition.tokens.end()) {
        for (const AddedToken& token : definition.added) {
            if (token.id >= bytes.size()) bytes.resize(token.id + 1);
            bytes[token.id] = token.text;
        }
    }
    State(const State&) = delete;
    State& operator=(const State&) = delete;

    /// Appends the tokens of a text.
    void encode(std::string_view text, bool with_special, Scratch& scratch,
                std::vector<uint32_t>& ids) const {
        const auto found = [&](const AddedToken& token) { ids.push_back(token.id); };
        const auto plain = [&](std::string_view stretch) { encode_stretch(stretch, scratch, ids); };
        const auto look_again = [&](std::string_view stretch) {
            if (definition.nfc) stretch = nfc(stretch, scratch.normal);
            second_finder.split(stretch, with_special, plain, found);
        };
        first_finder.split(text, with_special, look_again, found);
    }

    std::vector<uint32_t> encode(std::string_view text, bool with_special) const {
        std::vector<uint32_t> ids;
        ids.reserve(text.size() / 3);
        Scratch scratch;
        encode(text, with_special, scratch, ids);
        return ids;
    }

    /// Appends the tokens of text without added tokens.
    void encode_stretch(std::string_view text, Scratch& scratch, std::vector<uint32_t>& ids) const {
        if (definition.add_prefix_space && !text.starts_with(' ')) {
            scratch.with_space = ' ';
            scratch.with_space += text;
            text = scratch.with_space;
        }
        splitter.split(text, scratch.splitting, [&](size_t at, size_t length) {
            append_piece(text, at, length, scratch, ids);
        });
    }

    /// Appends the tokens of the piece text[at, at + length).
    void append_piece(std::string_view text, size_t at, size_t length, Scratch& scratch,
                      std::vector<uint32_t>& ids) const {
        const auto append = [&ids](std::span<const uint32_t> tokens) {
            ids.insert(ids.end(), tokens.begin(), tokens.end());
        };
        if (length > PieceKey::longest)
            return append(encoder.encode_piece(text.substr(at, length), scratch.merger));
        const PieceKey key = PieceKey::of(text, at, length);
        if (const uint32_t* whole = encoder.find_whole(key)) return ids.push_back(*whole);
        if (const auto known = scratch.cache.find(key); !known.empty()) return append(known);
        const auto tokens = encoder.merge_bytes(text.substr(at, length), scratch.merger);
        append(tokens);
        scratch.cache.insert(key, tokens);
    }

    const TokenizerDefinition definition;
    const Splitter splitter;
    const BytePairEncoder encoder;  // refers to definition.tokens
    const TokenFinder first_finder;
    const TokenFinder second_finder;      // searches what the first leaves over
    std::vector<std::string_view> bytes;  // by id
    const std::optional<uint32_t> end_of_text =
        definition.end ? definition.end : usual_end(definition);
};

Tokenizer::Tokenizer(TokenizerDefinition definition)
    : state_(std::make_shared<const State>(std::move(definition))) {}

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
    return Tokenizer(read_tokenizer(path));
}

Tokenizer Tokenizer::train(const WordCounts& counts, uint32_t vocab_size, uint64_t min_frequency) {
    if (vocab_size < min_trained_vocab || vocab_size > max_vocab_size)
        throw Error("a vocabulary of ", vocab_size, " tokens cannot be trained; ask for ",
                    min_trained_vocab, " (the 256 bytes and <|endoftext|>) to ", max_vocab_size);
    LearntMerges learnt = learn_merges(counts, vocab_size - 1, min_frequency);
    TokenizerDefinition definition;
    definition.added = {{static_cast<uint32_t>(learnt.tokens.size()), "<|endoftext|>"}};
    definition.tokens = std::move(learnt.tokens);
    definition.merges = std::move(learnt.merges);
    definition.patterns = {regex_of(counts.pattern())};
    return Tokenizer(std::move(definition));
}

Tokenizer Tokenizer::train(std::span<const std::string_view> texts, uint32_t vocab_size,
                           const TrainOptions& options) {
    WordCounts counts(options.pattern);
    for (const std::string_view text : texts) counts.add(text);
    return train(counts, vocab_size, options.min_frequency);
}

std::vector<uint32_t> Tokenizer::encode(std::string_view text) const {
    return state_->encode(text, false);
}

std::vector<uint32_t> Tokenizer::encode_with_special(std::string_view text) const {
    return state_->encode(text, true);
}

std::string Tokenizer::decode(std::span<const uint32_t> ids) const {
    std::string text;
    for (const uint32_t id : ids) text += token_bytes(id);
    return text;
}

std::string_view Tokenizer::token_bytes(uint32_t id) const {
    if (id >= vocab_size())
        throw Error("the token ", id, " is beyond this vocabulary of ", vocab_size(),
                    "; use the tokenizer the tokens were made with");
    return state_->bytes[id];
}

bool Tokenizer::is_special(uint32_t id) const {
    const auto& added = state_->definition.added;
    return std::any_of(added.begin(), added.end(),
                       [id](const AddedToken& token) { return token.id == id && token.special; });
}

bool Tokenizer::has_tokens_of(const Tokenizer& other) const {
    return state_->bytes == other.state_->bytes;
}

uint32_t Tokenizer::vocab_size() const { return static_cast<uint32_t>(state_->bytes.size()); }

std::optional<uint32_t> Tokenizer::end_of_text() const { return state_->end_of_text; }

std::optional<uint32_t> Tokenizer::begin_of_text() const { return state_->definition.begin; }

std::optional<uint32_t> Tokenizer::document_boundary() const {
    return begin_of_text() ? begin_of_text() : end_of_text();
}

Tokenizer Tokenizer::with_document_tokens(const std::string& begin, const std::string& end) const {
    TokenizerDefinition definition = state_->definition;
    const auto find = [&](const std::string& text) {
        if (const auto id = find_added(definition, text)) return *id;
        std::string known;
        for (const AddedToken& token : definition.added)
            if (token.special && known.size() < 200)
                known += concat(known.empty() ? "" : ", ", token.text);
        throw Error("the tokenizer has no special token ", text, "; it has ",
                    known.empty() ? "none" : known);
    };
    if (begin == "none")
        definition.begin.reset();
    else if (!begin.empty())
        definition.begin = find(begin);
    if (!end.empty()) definition.end = find(end);
    return Tokenizer(std::move(definition));
}

std::vector<uint32_t> Tokenizer::encode_beginning(std::string_view text) const {
    std::vector<uint32_t> ids = encode(text);
    if (begin_of_text()) ids.insert(ids.begin(), *begin_of_text());
    if (ids.empty()) ids.push_back(end_of_text().value_or(0));
    return ids;
}

const std::vector<std::string>& Tokenizer::patterns() const { return state_->definition.patterns; }

std::string Tokenizer::to_json() const { return write_tokenizer_json(state_->definition); }

Encoder::Encoder(const Tokenizer& tokenizer)
    : state_(tokenizer.state_), scratch_(std::make_unique<Scratch>()) {}
Encoder::Encoder(Encoder&&) noexcept = default;
Encoder& Encoder::operator=(Encoder&&) noexcept = default;
Encoder::~Encoder() = default;

void Encoder::encode(std::string_view text, std::vector<uint32_t>& ids) {
    state_->encode(text, false, *scratch_, ids);
}

void Tokenizer::save(const std::filesystem::path& tokenizer_json) const {
    write_file(tokenizer_json, to_json());
}

}  // namespace train_gpt
