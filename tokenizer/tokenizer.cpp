#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/error.h"
#include "kernels/file.h"
#include "tokenizer/bpe.h"
#include "tokenizer/bpe_train.h"
#include "tokenizer/formats.h"

namespace train_gpt {

namespace {

/// Finds a set of added tokens in a text.
class TokenFinder {
  public:
    explicit TokenFinder(std::vector<const AddedToken*> tokens) : tokens_(std::move(tokens)) {
        std::stable_sort(tokens_.begin(), tokens_.end(),
                         [](auto* a, auto* b) { return a->text.size() > b->text.size(); });
        for (const AddedToken* token : tokens_)
            starts_[static_cast<uint8_t>(token->text[0])] = true;
    }

    /// Calls plain(text) for the stretches without a token and found(token) for the tokens, in
    /// order. The leftmost token is taken, of those that start at one place the longest. Without
    /// `with_special`, a special token is found too, so that no other is seen inside it, but stays
    /// part of its stretch.
    template <class Plain, class Found>
    void split(std::string_view text, bool with_special, Plain&& plain, Found&& found) const {
        size_t begin = 0;
        for (size_t at = tokens_.empty() ? text.size() : 0; at < text.size();) {
            const AddedToken* token = token_at(text.substr(at));
            const size_t end = at + (token ? token->text.size() : 1);
            if (token && (with_special || !token->special)) {
                if (at > begin) plain(text.substr(begin, at - begin));
                found(*token);
                begin = end;
            }
            at = end;
        }
        if (begin < text.size()) plain(text.substr(begin));
    }

  private:
    const AddedToken* token_at(std::string_view text) const {
        if (!starts_[static_cast<uint8_t>(text[0])]) return nullptr;
        for (const AddedToken* token : tokens_)
            if (text.starts_with(token->text)) return token;
        return nullptr;
    }

    std::vector<const AddedToken*> tokens_;  // longest first
    std::array<bool, 256> starts_{};         // bytes that some token starts with
};

std::vector<const AddedToken*> select(const std::vector<AddedToken>& added, bool normalized) {
    std::vector<const AddedToken*> selected;
    for (const AddedToken& token : added)
        if (token.normalized == normalized) selected.push_back(&token);
    return selected;
}

}  // namespace

struct Tokenizer::State {
    explicit State(TokenizerDefinition d)
        : definition(std::move(d)),
          encoder(definition.tokens, definition.merges, definition.whole_pieces),
          first_finder(select(definition.added, false)),
          second_finder(select(definition.added, true)),
          bytes(definition.tokens.begin(), definition.tokens.end()) {
        for (const AddedToken& token : definition.added) {
            if (token.id >= bytes.size()) bytes.resize(token.id + 1);
            bytes[token.id] = token.text;
        }
        for (const char* name : {"<|endoftext|>", "<|end_of_text|>"})
            for (const AddedToken& token : definition.added)
                if (!end_of_text && token.text == name) end_of_text = token.id;
    }
    State(const State&) = delete;
    State& operator=(const State&) = delete;

    std::vector<uint32_t> encode(std::string_view text, bool with_special) const {
        std::vector<uint32_t> ids;
        ids.reserve(text.size() / 3);
        PieceMerger merger;
        const auto found = [&](const AddedToken& token) { ids.push_back(token.id); };
        const auto plain = [&](std::string_view stretch) { encode_stretch(stretch, merger, ids); };
        const auto look_again = [&](std::string_view stretch) {
            second_finder.split(stretch, with_special, plain, found);
        };
        first_finder.split(text, with_special, look_again, found);
        return ids;
    }

    /// Appends the tokens of text without added tokens.
    void encode_stretch(std::string_view text, PieceMerger& merger,
                        std::vector<uint32_t>& ids) const {
        std::string with_space;
        if (definition.add_prefix_space && !text.starts_with(' ')) {
            with_space.reserve(text.size() + 1);
            with_space.append(" ").append(text);
            text = with_space;
        }
        while (!text.empty()) {
            const size_t length = first_piece(definition.pattern, text);
            encoder.encode_piece(text.substr(0, length), merger, ids);
            text.remove_prefix(length);
        }
    }

    const TokenizerDefinition definition;
    const BytePairEncoder encoder;  // refers to definition.tokens
    const TokenFinder first_finder;
    const TokenFinder second_finder;      // looks through what the first leaves over
    std::vector<std::string_view> bytes;  // by id
    std::optional<uint32_t> end_of_text;
};

Tokenizer::Tokenizer(TokenizerDefinition definition)
    : state_(std::make_shared<const State>(std::move(definition))) {}

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
    return Tokenizer(read_tokenizer(path));
}

Tokenizer Tokenizer::train(std::span<const std::string_view> texts, uint32_t vocab_size,
                           const TrainOptions& options) {
    if (vocab_size < 257 || vocab_size > max_vocab_size)
        throw Error("a vocabulary of ", vocab_size,
                    " tokens cannot be trained; ask for 257 (the 256 bytes and ",
                    "<|endoftext|>) to ", max_vocab_size);
    LearntMerges learnt =
        learn_merges(texts, options.pattern, vocab_size - 1, options.min_frequency);
    TokenizerDefinition definition;
    definition.added = {{static_cast<uint32_t>(learnt.tokens.size()), "<|endoftext|>"}};
    definition.tokens = std::move(learnt.tokens);
    definition.merges = std::move(learnt.merges);
    definition.pattern = options.pattern;
    return Tokenizer(std::move(definition));
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

uint32_t Tokenizer::vocab_size() const { return static_cast<uint32_t>(state_->bytes.size()); }

std::optional<uint32_t> Tokenizer::end_of_text() const { return state_->end_of_text; }

Pattern Tokenizer::pattern() const { return state_->definition.pattern; }

std::string Tokenizer::to_json() const { return write_tokenizer_json(state_->definition); }

void Tokenizer::save(const std::filesystem::path& tokenizer_json) const {
    write_file(tokenizer_json, to_json());
}

}  // namespace train_gpt
