// Reads and writes Hugging Face's tokenizer.json, and reads GPT-2's vocab.json with merges.txt,
// which has parts in common with it.
#include <algorithm>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/json_text.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/formats.h"
#include "tokenizer/nfc.h"
#include "tokenizer/splitter.h"

namespace train_gpt {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

/// The JSON values of one file. Every mistake becomes an Error that names the file and the place.
class JsonReader {
  public:
    explicit JsonReader(const fs::path& file) : file_(file) {
        const MappedFile mapped = map_vocabulary(file);
        const std::string_view text = mapped.text();
        if (const std::string hazard = json_hazard(text); !hazard.empty()) throw fail(hazard);
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
        std::string storage;
        if (definition.nfc && token.normalized && nfc(token.text, storage) != token.text)
            throw reader.fail(concat("has the added token \"", token.text,
                                     "\", which its normalizer changes; this is not supported"));
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

/// The pattern of a Split or Digits.
std::string read_split(const JsonReader& reader, const json& step, const std::string& type) {
    if (type == "Digits") {
        const bool each = reader.get(step, "individual_digits", false);
        return std::string(each ? single_digits_regex : whole_numbers_regex);
    }
    const json& pattern = reader.object(step, "pattern");
    std::string regex = reader.get<std::string>(pattern, "Regex", "");
    if (regex.empty()) regex = escape_regex(reader.get<std::string>(pattern, "String", ""));
    if (regex.empty()) throw reader.fail("has a Split without a pattern");
    // Published patterns match all of a text, so that nothing lies between the matches.
    const std::string behavior = reader.get<std::string>(step, "behavior", "");
    const bool only_matches = behavior == "Removed" && reader.get(step, "invert", false);
    if (behavior != "Isolated" && !(only_matches && matches_everything(regex)))
        throw reader.fail(concat("has a Split of behavior \"", behavior, "\" by the pattern ",
                                 regex, ", which is not supported"));
    return regex;
}

/// The pre-tokenizer must be a ByteLevel, with its own pattern (GPT-2's) or after steps that cut
/// text: Split or Digits.
void read_pre_tokenizer(const JsonReader& reader, TokenizerDefinition& definition) {
    const json& outer = reader.object(reader.root(), "pre_tokenizer");
    std::vector<const json*> steps;
    if (reader.get<std::string>(outer, "type", "") == "Sequence")
        for (const json& step : reader.list(outer, "pretokenizers")) steps.push_back(&step);
    else
        steps.push_back(&outer);

    definition.patterns.clear();
    bool has_split = false;
    const json* byte_level = nullptr;
    for (const json* step : steps) {
        if (!step->is_object()) throw reader.fail("has a pre_tokenizer step that is not an object");
        const std::string type = reader.get<std::string>(*step, "type", "");
        if (type == "ByteLevel" && !byte_level)
            byte_level = step;
        else if ((type == "Split" || type == "Digits") && !byte_level)
            definition.patterns.push_back(read_split(reader, *step, type));
        else
            throw reader.fail(concat("has the pre_tokenizer \"", type,
                                     "\" in a place where it is not supported (known: ByteLevel, "
                                     "Split and Digits before it)"));
    }
    has_split = !definition.patterns.empty();
    if (!byte_level)
        throw reader.fail("has a pre_tokenizer without ByteLevel, which is not supported");

    if (reader.get(*byte_level, "use_regex", true))
        definition.patterns.push_back(regex_of(Pattern::gpt2));
    definition.add_prefix_space = reader.get(*byte_level, "add_prefix_space", true);
    if (definition.patterns.empty())
        throw reader.fail("has a pre_tokenizer without a pattern, which is not supported");
    if (definition.add_prefix_space && has_split)
        throw reader.fail(
            "has a Split before a ByteLevel with add_prefix_space, which is not supported");
    try {
        Splitter{definition.patterns};
    } catch (const Error& error) {
        throw reader.fail(concat("splits text in an unknown way: ", error.what()));
    }
}

/// The only special token of a part of a template, besides `known`.
std::string only_special(const JsonReader& reader, const json& items, const std::string& known) {
    std::string only;
    int found = 0;
    for (const json& item : items) {
        const std::string name = reader.get<std::string>(item["SpecialToken"], "id", "");
        if (name.empty() || name == known) continue;
        only = name;
        ++found;
    }
    return found == 1 ? only : "";
}

/// Reads which tokens begin and end a document from what the post-processor puts around texts: the
/// single token before a text, and the single one after it, or else between two texts.
void read_post_processor(const JsonReader& reader, const json& step,
                         TokenizerDefinition& definition) {
    if (!step.is_object()) return;
    const std::string type = reader.get<std::string>(step, "type", "");
    const auto set = [&](std::optional<uint32_t>& token, const std::string& name) {
        if (const auto id = find_added(definition, name)) token = id;
    };
    if (type == "Sequence")
        for (const json& inner : reader.list(step, "processors"))
            read_post_processor(reader, inner, definition);
    if (type == "RobertaProcessing" || type == "BertProcessing") {
        for (const auto& [key, token] :
             {std::pair("cls", &definition.begin), std::pair("sep", &definition.end)}) {
            const json& pair = reader.list(step, key);
            if (!pair.empty() && pair[0].is_string()) set(*token, pair[0].get<std::string>());
        }
    }
    if (type != "TemplateProcessing") return;
    // The items before A, between A and B, and after B.
    const auto parts_of = [&](const char* key) {
        std::vector<json> parts(1, json::array());
        for (const json& item : reader.list(step, key)) {
            if (!item.is_object() || item.size() != 1 || !item.begin()->is_object())
                throw reader.fail("has a malformed template in its post_processor");
            if (item.contains("Sequence"))
                parts.push_back(json::array());
            else if (item.contains("SpecialToken"))
                parts.back().push_back(item);
        }
        return parts;
    };
    const std::vector<json> single = parts_of("single"), pair = parts_of("pair");
    const std::string begin = only_special(reader, single[0], "");
    std::string end;
    if (single.size() > 1) end = only_special(reader, single[1], "");
    if (end.empty() && pair.size() > 2) end = only_special(reader, pair[1], begin);
    set(definition.begin, begin);
    set(definition.end, end);
}

/// What read_post_processor() reads; null if there is nothing to say.
json post_processor_of(const TokenizerDefinition& definition) {
    const auto usual = usual_end(definition), end = definition.end ? definition.end : usual;
    if (!definition.begin && end == usual) return nullptr;
    json special = json::object();
    const auto token = [&](uint32_t id, int text) {
        const auto found =
            std::ranges::find_if(definition.added, [=](const auto& t) { return t.id == id; });
        special[found->text] = {{"id", found->text}, {"ids", {id}}, {"tokens", {found->text}}};
        return json{{"SpecialToken", {{"id", found->text}, {"type_id", text}}}};
    };
    const auto document = [&](const char* name, int text, bool ends) {
        json items = json::array();
        if (definition.begin) items.push_back(token(*definition.begin, text));
        items.push_back({{"Sequence", {{"id", name}, {"type_id", text}}}});
        if (ends && end) items.push_back(token(*end, text));
        return items;
    };
    json pair = document("A", 0, true);
    for (const json& item : document("B", 1, false)) pair.push_back(item);
    return {{"type", "TemplateProcessing"},
            {"single", document("A", 0, false)},
            {"pair", pair},
            {"special_tokens", special}};
}

/// Only NFC is supported, alone or in a sequence.
void read_normalizer(const JsonReader& reader, const json& step, TokenizerDefinition& definition) {
    if (step.is_null()) return;
    const std::string type =
        step.is_object() ? reader.get<std::string>(step, "type", "?") : std::string("?");
    if (type == "Sequence") {
        for (const json& inner : reader.list(step, "normalizers"))
            read_normalizer(reader, inner, definition);
        return;
    }
    if (type != "NFC")
        throw reader.fail(concat("has a normalizer (", type, "), which is not supported"));
    definition.nfc = true;
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
    read_normalizer(reader, reader.root().value("normalizer", json()), definition);
    read_pre_tokenizer(reader, definition);
    read_added_tokens(reader, definition);
    read_post_processor(reader, reader.root().value("post_processor", json()), definition);
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

void read_tokenizer_config(const fs::path& file, TokenizerDefinition& definition) {
    const JsonReader reader(file);
    const auto token = [&](const char* key) -> std::optional<uint32_t> {
        const auto found = reader.root().find(key);
        if (found == reader.root().end() || found->is_null()) return {};
        if (found->is_object())
            return find_added(definition, reader.get<std::string>(*found, "content", ""));
        return find_added(definition, reader.get<std::string>(reader.root(), key, ""));
    };
    if (const auto end = token("eos_token")) definition.end = end;
    const auto adds = reader.root().find("add_bos_token");
    if (adds == reader.root().end() || !adds->is_boolean()) return;
    definition.begin = adds->get<bool>() ? token("bos_token") : std::nullopt;
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

    // ByteLevel's own pattern is GPT-2's.
    const bool own_pattern = known_pattern(definition.patterns.back()) == Pattern::gpt2;
    const std::span splits =
        std::span(definition.patterns).first(definition.patterns.size() - own_pattern);
    json pre_tokenizer = {{"type", "ByteLevel"},
                          {"add_prefix_space", definition.add_prefix_space},
                          {"trim_offsets", true},
                          {"use_regex", own_pattern}};
    if (!splits.empty()) {
        json steps = json::array();
        for (const std::string& pattern : splits)
            steps.push_back({{"type", "Split"},
                             {"pattern", {{"Regex", pattern}}},
                             {"behavior", "Isolated"},
                             {"invert", false}});
        steps.push_back(pre_tokenizer);
        pre_tokenizer = {{"type", "Sequence"}, {"pretokenizers", steps}};
    }
    const json normalizer = definition.nfc ? json{{"type", "NFC"}} : json();
    const json root = {
        {"version", "1.0"},
        {"truncation", nullptr},
        {"padding", nullptr},
        {"added_tokens", added},
        {"normalizer", normalizer},
        {"pre_tokenizer", pre_tokenizer},
        {"post_processor", post_processor_of(definition)},
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
