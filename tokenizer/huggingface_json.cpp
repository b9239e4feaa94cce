// Reads and writes Hugging Face's tokenizer.json, and reads GPT-2's vocab.json with merges.txt,
// which has parts in common with it.
#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/formats.h"

namespace train_gpt {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

/// The spellings of each pattern in tokenizer.json files; the first spelling of a pattern is the
/// one written. All spellings of a pattern mean the same to Oniguruma, the engine of Hugging Face's
/// tokenizers. (tiktoken's spelling of cl100k does not: in Oniguruma, \p{N}{1,3}+ matches numbers
/// of any length and $ matches the end of any line.)
constexpr std::array<std::pair<Pattern, std::string_view>, 4> pattern_spellings{{
    {Pattern::gpt2,
     R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
    {Pattern::gpt2, R"('(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
    {Pattern::cl100k,
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
     R"(|\s+(?![\s\S])|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {Pattern::cl100k_first,
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
     R"(|\s*[\r\n]+|\s+(?!\S)|\s+)"},
}};

/// The JSON values of one file. Every mistake becomes an Error that names the file and the place.
class JsonReader {
  public:
    explicit JsonReader(const fs::path& file) : file_(file) {
        const MappedFile mapped = map_vocabulary(file);
        const std::string_view text = mapped.text();
        // The parser treats a NUL as the end and ignores what follows.
        if (const size_t nul = text.find('\0'); nul != text.npos)
            throw fail(concat("is not valid JSON at byte ", nul + 1, " of ", text.size()));
        try {
            root_ = json::parse(text.begin(), text.end());
        } catch (const json::parse_error& error) {
            throw fail(concat("is not valid JSON at byte ", error.byte, " of ", text.size()));
        } catch (const json::exception&) {
            throw fail("holds a number that JSON cannot represent");
        }
        if (!root_.is_object()) throw fail("is not a JSON object");
    }

    const json& root() const { return root_; }
    const fs::path& file() const { return file_; }

    Error fail(const std::string& what) const {
        return Error(file_.string(), " ", what,
                     "; give a byte-level BPE tokenizer as Hugging Face writes it");
    }

    /// A member, or `fallback` when it is missing or null.
    template <class T>
    T get(const json& object, const char* key, T fallback) const {
        const auto found = object.find(key);
        if (found == object.end() || found->is_null()) return fallback;
        try {
            return found->template get<T>();
        } catch (const json::exception&) {
            throw fail(concat("has the wrong kind of value for \"", key, "\""));
        }
    }

    /// A required member, which must be an object (or a list).
    const json& object(const json& parent, const char* key) const {
        const auto found = parent.find(key);
        if (found == parent.end() || !found->is_object())
            throw fail(concat("has no object \"", key, "\""));
        return *found;
    }
    const json& list(const json& parent, const char* key) const {
        const auto found = parent.find(key);
        if (found == parent.end() || !found->is_array())
            throw fail(concat("has no list \"", key, "\""));
        return *found;
    }

    /// A token id.
    uint32_t id(const json& value, const std::string& of) const {
        if (!value.is_number_unsigned() || value.get<uint64_t>() >= max_vocab_size)
            throw fail(concat("has an id for \"", of, "\" that is not a whole number below ",
                              max_vocab_size));
        return value.get<uint32_t>();
    }

  private:
    fs::path file_;
    json root_;
};

/// Ids by name, as files write them.
using Names = std::unordered_map<std::string, uint32_t>;

/// Fills definition.tokens from an object of names and ids. Names that are not in the byte alphabet
/// must be names of added tokens.
Names read_vocab(const JsonReader& reader, const json& vocab, TokenizerDefinition& definition) {
    Names names;
    for (const auto& [name, value] : vocab.items()) {
        const uint32_t id = reader.id(value, name);
        names.emplace(name, id);
        if (id >= definition.tokens.size()) definition.tokens.resize(id + 1);
        const auto bytes = from_byte_alphabet(name);
        if (!bytes) {
            const auto is_it = [&text = name](const AddedToken& token) {
                return token.text == text;
            };
            if (std::none_of(definition.added.begin(), definition.added.end(), is_it))
                throw reader.fail(concat("has the token \"", name,
                                         "\", which is not in the byte-level alphabet"));
            continue;
        }
        if (bytes->empty()) throw reader.fail("has an empty token");
        if (!definition.tokens[id].empty())
            throw reader.fail(concat("has two tokens with the id ", id));
        definition.tokens[id] = *bytes;
    }
    return names;
}

/// Appends the merge of two named tokens; `where` identifies the merge in errors.
void add_merge(const Names& names, const std::string& left, const std::string& right,
               const std::string& where, const fs::path& file, TokenizerDefinition& definition) {
    const auto id = [&](const std::string& name) {
        const auto found = names.find(name);
        if (found == names.end() || definition.tokens[found->second].empty())
            throw Error(file.string(), " ", where, ": \"", name,
                        "\" is not in the vocabulary; use files that belong together");
        return found->second;
    };
    definition.merges.push_back({id(left), id(right), id(left + right)});
}

/// Throws Error if a pair of tokens has more than one merge.
void check_merges(const TokenizerDefinition& definition, const fs::path& file) {
    std::unordered_map<uint64_t, size_t> seen;
    for (size_t i = 0; i < definition.merges.size(); ++i) {
        const Merge& merge = definition.merges[i];
        const auto [found, is_new] = seen.try_emplace(uint64_t{merge.left} << 32 | merge.right, i);
        if (!is_new)
            throw Error(file.string(), ": merge ", i + 1, " repeats merge ", found->second + 1,
                        "; download the file again");
    }
}

/// The two names of a merge written "a b".
bool split_merge(std::string_view line, std::string& left, std::string& right) {
    const size_t space = line.find(' ');
    if (space == 0 || space == std::string_view::npos || space + 1 == line.size() ||
        line.find(' ', space + 1) != std::string_view::npos)
        return false;
    left = line.substr(0, space);
    right = line.substr(space + 1);
    return true;
}

void read_added_tokens(const JsonReader& reader, TokenizerDefinition& definition) {
    const auto found = reader.root().find("added_tokens");
    if (found == reader.root().end() || found->is_null()) return;
    if (!found->is_array()) throw reader.fail("has \"added_tokens\" that are not a list");
    for (const json& entry : *found) {
        if (!entry.is_object()) throw reader.fail("has an added token that is not an object");
        AddedToken token;
        token.text = reader.get<std::string>(entry, "content", "");
        if (token.text.empty()) throw reader.fail("has an added token without \"content\"");
        token.id = reader.id(entry.value("id", json()), token.text);
        token.special = reader.get(entry, "special", false);
        token.normalized = reader.get(entry, "normalized", !token.special);
        for (const char* flag : {"single_word", "lstrip", "rstrip"})
            if (reader.get(entry, flag, false))
                throw reader.fail(concat("has the added token \"", token.text, "\" with \"", flag,
                                         "\", which is not supported"));
        for (const AddedToken& other : definition.added)
            if (other.id == token.id || other.text == token.text)
                throw reader.fail(concat("has the added token \"", token.text, "\" (id ", token.id,
                                         ") next to \"", other.text, "\" (id ", other.id, ")"));
        definition.added.push_back(std::move(token));
    }
}

/// An added token that is also in the vocabulary must have the same id there, and no other token
/// may have its id.
void check_added_tokens(const JsonReader& reader, const Names& names,
                        const TokenizerDefinition& definition) {
    for (const AddedToken& token : definition.added) {
        const auto named = names.find(token.text);
        const bool taken = token.id < definition.tokens.size() &&
                           !definition.tokens[token.id].empty() &&
                           (named == names.end() || named->second != token.id);
        if (taken || (named != names.end() && named->second != token.id))
            throw reader.fail(concat("gives the added token \"", token.text, "\" the id ", token.id,
                                     ", which contradicts the vocabulary"));
    }
}

/// The pre-tokenizer must be a Split by a known pattern followed by ByteLevel without a pattern, or
/// ByteLevel alone with its own pattern, which is GPT-2's.
void read_pre_tokenizer(const JsonReader& reader, TokenizerDefinition& definition) {
    const json& outer = reader.object(reader.root(), "pre_tokenizer");
    std::vector<const json*> steps;
    if (reader.get<std::string>(outer, "type", "") == "Sequence")
        for (const json& step : reader.list(outer, "pretokenizers")) steps.push_back(&step);
    else
        steps.push_back(&outer);

    const json* split = nullptr;
    const json* byte_level = nullptr;
    for (const json* step : steps) {
        if (!step->is_object()) throw reader.fail("has a pre_tokenizer step that is not an object");
        const std::string type = reader.get<std::string>(*step, "type", "");
        if (type == "ByteLevel" && !byte_level)
            byte_level = step;
        else if (type == "Split" && !split && !byte_level)
            split = step;
        else
            throw reader.fail(concat(
                "has the pre_tokenizer \"", type,
                "\" in a place where it is not supported (known: ByteLevel, Split before it)"));
    }
    if (!byte_level)
        throw reader.fail("has a pre_tokenizer without ByteLevel, which is not supported");

    const bool own_pattern = reader.get(*byte_level, "use_regex", true);
    definition.add_prefix_space = reader.get(*byte_level, "add_prefix_space", true);
    if (!split) {
        if (!own_pattern)
            throw reader.fail("has a pre_tokenizer without a pattern, which is not supported");
        definition.pattern = Pattern::gpt2;
        return;
    }
    if (own_pattern || definition.add_prefix_space)
        throw reader.fail(
            "has a Split before a ByteLevel with use_regex or add_prefix_space, which is not "
            "supported");

    const std::string behavior = reader.get<std::string>(*split, "behavior", "");
    const bool inverted = reader.get(*split, "invert", false);
    if (behavior != "Isolated" && !(behavior == "Removed" && inverted))
        throw reader.fail(
            concat("has a Split of behavior \"", behavior, "\", which is not supported"));
    const std::string regex =
        reader.get<std::string>(reader.object(*split, "pattern"), "Regex", "");
    const auto known = std::find_if(pattern_spellings.begin(), pattern_spellings.end(),
                                    [&](const auto& spelling) { return spelling.second == regex; });
    if (known == pattern_spellings.end())
        throw reader.fail(concat("splits text by the pattern ", regex,
                                 ", which is neither GPT-2's nor cl100k's"));
    definition.pattern = known->first;
}

void refuse_unsupported(const JsonReader& reader, const json& model) {
    const json& root = reader.root();
    const std::string kind = reader.get<std::string>(model, "type", "BPE");
    if (kind != "BPE")
        throw reader.fail(concat("has a model of type \"", kind, "\", which is not supported"));
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
        if (!reader.get<std::string>(model, key, "").empty())
            throw reader.fail(concat("has a model with \"", key, "\", which is not supported"));
    if (reader.get(model, "dropout", 0.0) != 0)
        throw reader.fail("has a model with \"dropout\", which is not supported");
    if (const auto normalizer = root.find("normalizer");
        normalizer != root.end() && !normalizer->is_null())
        throw reader.fail(concat(
            "has a normalizer (",
            normalizer->is_object() ? reader.get<std::string>(*normalizer, "type", "?") : "?",
            "), which is not supported"));
    if (const auto decoder = root.find("decoder"); decoder != root.end() && !decoder->is_null()) {
        const std::string type =
            decoder->is_object() ? reader.get<std::string>(*decoder, "type", "?") : "?";
        if (type != "ByteLevel")
            throw reader.fail(concat("has the decoder ", type, ", which is not supported"));
    }
}

}  // namespace

TokenizerDefinition read_tokenizer_json(const fs::path& file) {
    const JsonReader reader(file);
    const json& model = reader.object(reader.root(), "model");
    refuse_unsupported(reader, model);

    TokenizerDefinition definition;
    read_pre_tokenizer(reader, definition);
    read_added_tokens(reader, definition);
    const Names names = read_vocab(reader, reader.object(model, "vocab"), definition);
    check_added_tokens(reader, names, definition);
    check_tokens(definition, file);

    definition.whole_pieces = reader.get(model, "ignore_merges", false);
    std::string left, right;
    for (const json& merge : reader.list(model, "merges")) {
        const std::string where = concat("merge ", definition.merges.size() + 1);
        if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
            left = merge[0].get<std::string>();
            right = merge[1].get<std::string>();
        } else if (!merge.is_string() ||
                   !split_merge(merge.get_ref<const std::string&>(), left, right)) {
            throw reader.fail(
                concat("has a ", where, " that is neither \"a b\" nor [\"a\", \"b\"]"));
        }
        add_merge(names, left, right, where, file, definition);
    }
    check_merges(definition, file);
    return definition;
}

TokenizerDefinition read_vocab_and_merges(const fs::path& vocab, const fs::path& merges) {
    TokenizerDefinition definition;
    const JsonReader reader(vocab);
    const Names names = read_vocab(reader, reader.root(), definition);
    check_tokens(definition, vocab);
    if (const auto end = names.find("<|endoftext|>"); end != names.end())
        definition.added.push_back({end->second, end->first});

    const MappedFile mapped = map_vocabulary(merges);
    std::string_view rest = mapped.text();
    std::string left, right;
    for (size_t number = 1; !rest.empty(); ++number) {
        std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(rest.size(), line.size() + 1));
        if (line.ends_with('\r')) line.remove_suffix(1);
        if (line.empty() || line.starts_with("#version")) continue;
        const std::string where = concat("line ", number);
        if (!split_merge(line, left, right))
            throw Error(merges.string(), " ", where,
                        ": not two tokens with one space between; download it again");
        add_merge(names, left, right, where, merges, definition);
    }
    check_merges(definition, merges);
    return definition;
}

std::string write_tokenizer_json(const TokenizerDefinition& definition) {
    std::vector<std::string> names(definition.tokens.size());
    for (size_t id = 0; id < names.size(); ++id)
        names[id] = to_byte_alphabet(definition.tokens[id]);

    json added = json::array();
    for (const AddedToken& token : definition.added) {
        added.push_back({{"id", token.id},
                         {"content", token.text},
                         {"single_word", false},
                         {"lstrip", false},
                         {"rstrip", false},
                         {"normalized", token.normalized},
                         {"special", token.special}});
        if (token.id >= names.size()) names.resize(token.id + 1);
        if (names[token.id].empty()) names[token.id] = token.text;
    }

    json vocab = json::object();
    for (size_t id = 0; id < names.size(); ++id)
        if (!names[id].empty()) vocab.emplace(names[id], id);

    json merges = json::array();
    for (const Merge& merge : definition.merges)
        merges.push_back(names[merge.left] + " " + names[merge.right]);

    const json byte_level = {{"type", "ByteLevel"},
                             {"add_prefix_space", definition.add_prefix_space},
                             {"trim_offsets", true},
                             {"use_regex", definition.pattern == Pattern::gpt2}};
    json pre_tokenizer = byte_level;
    if (definition.pattern != Pattern::gpt2) {
        const auto spelling =
            std::find_if(pattern_spellings.begin(), pattern_spellings.end(),
                         [&](const auto& known) { return known.first == definition.pattern; });
        const json split = {{"type", "Split"},
                            {"pattern", {{"Regex", spelling->second}}},
                            {"behavior", "Isolated"},
                            {"invert", false}};
        pre_tokenizer = {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}};
    }
    const json root = {
        {"version", "1.0"},
        {"truncation", nullptr},
        {"padding", nullptr},
        {"added_tokens", added},
        {"normalizer", nullptr},
        {"pre_tokenizer", pre_tokenizer},
        {"post_processor", nullptr},
        {"decoder",
         {{"type", "ByteLevel"},
          {"add_prefix_space", true},
          {"trim_offsets", true},
          {"use_regex", true}}},
        {"model",
         {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", nullptr},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", false},
          {"byte_fallback", false},
          {"ignore_merges", definition.whole_pieces},
          {"vocab", vocab},
          {"merges", merges}}},
    };
    return root.dump(2) + "\n";
}

}  // namespace train_gpt
