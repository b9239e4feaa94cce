// Tokenizers whose text is cut by patterns that PCRE2 matches, and which tokens begin and end
// documents.
#include <map>
#include <optional>

#include "base/error.h"
#include "base/utf8.h"
#include "test/catch.h"
#include "test/text.h"
#include "test/tokenizer/reference.h"
#include "tokenizer/formats.h"
#include "tokenizer/nfc.h"
#include "tokenizer/splitter.h"
#include "tokenizer/tokenizer.h"

namespace train_gpt {

namespace {

using nlohmann::json;
using Ids = std::vector<uint32_t>;

Tokenizer load_published(const json& tokenizer, const json& config = nullptr) {
    const TemporaryDirectory folder;
    write_file(folder / "tokenizer.json", tokenizer.dump());
    if (!config.is_null()) write_file(folder / "tokenizer_config.json", config.dump());
    return Tokenizer::load(folder.path());
}

std::string error_of_json(const json& tokenizer) {
    return error_of([&] { load_published(tokenizer); });
}

json trained_json() { return read_fixture("trained.json"); }

json with_parts(const json& parts) {
    json file = trained_json();
    for (const char* part : {"pre_tokenizer", "normalizer"}) file[part] = parts.at(part);
    return file;
}

std::vector<std::string> pieces_of(const std::vector<std::string>& patterns,
                                   std::string_view text) {
    Splitter::Scratch scratch;
    std::vector<std::string> pieces;
    size_t next = 0;
    Splitter(patterns).split(text, scratch, [&](size_t at, size_t length) {
        CHECK(at == next);
        pieces.emplace_back(text.substr(at, length));
        next = at + length;
    });
    CHECK(next == text.size());
    return pieces;
}

std::vector<std::string> pieces_of(const std::string& pattern, std::string_view text) {
    return pieces_of(std::vector{pattern}, text);
}

using PieceList = std::vector<std::string>;

json with_special(std::initializer_list<std::pair<const char*, int>> tokens) {
    json file = trained_json();
    for (const auto& [text, id] : tokens)
        file["added_tokens"].push_back({{"id", id},
                                        {"content", text},
                                        {"single_word", false},
                                        {"lstrip", false},
                                        {"rstrip", false},
                                        {"normalized", false},
                                        {"special", true}});
    return file;
}

json special(const char* name) { return {{"SpecialToken", {{"id", name}, {"type_id", 0}}}}; }
json sequence(const char* name) { return {{"Sequence", {{"id", name}, {"type_id", 0}}}}; }

}  // namespace

TEST_CASE("published ways to cut text give the ids of Hugging Face's tokenizers") {
    const json fixture = read_fixture("published.json");
    for (const auto& [name, parts] : fixture.at("tokenizers").items()) {
        const Tokenizer tokenizer = load_published(with_parts(parts));
        const Tokenizer again = load_published(json::parse(tokenizer.to_json()));
        CHECK(again.patterns() == tokenizer.patterns());
        Encoder encoder(again);
        const bool is_nfc = tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9");
        for (size_t i = 0; i < fixture.at("strings").size(); ++i) {
            const std::string text = fixture.at("strings")[i];
            const Ids expected = parts.at("ids")[i];
            CAPTURE(name, text);
            CHECK(tokenizer.encode(text) == expected);
            Ids ids;
            encoder.encode(text, ids);
            CHECK(ids == expected);
            std::string normal;
            CHECK(tokenizer.decode(ids) == (is_nfc ? std::string(nfc(text, normal)) : text));
        }
    }
}

TEST_CASE("PCRE2 cuts by the known patterns as their own code does") {
    for (const Pattern pattern :
         {Pattern::gpt2, Pattern::cl100k, Pattern::cl100k_first, Pattern::qwen2}) {
        // A group around it makes the pattern unknown.
        const std::string known = regex_of(pattern), unknown = "(?:" + known + ")";
        REQUIRE(known_pattern(known) == pattern);
        REQUIRE_FALSE(known_pattern(unknown));
        for (int round = 0; round < 100; ++round) {
            const std::string text = random_bytes(static_cast<size_t>(random_int(0, 300)));
            CAPTURE(pattern_name(pattern), text);
            CHECK(pieces_of(unknown, text) == pieces_of(known, text));
        }
    }
}

TEST_CASE("patterns mean what they mean to Oniguruma") {
    // Spaces, words, digits.
    CHECK(pieces_of(R"(\s+)", "a\u180E \u0085\u3000b") ==
          PieceList{"a\u180E", " \u0085\u3000", "b"});
    CHECK(pieces_of(R"([^\S\n]+)", "a \t\nb") == PieceList{"a", " \t", "\nb"});
    CHECK(pieces_of(R"([\s\S])", "a\u180E\n") == PieceList{"a", "\u180E", "\n"});
    CHECK(pieces_of(R"([\s\S])", "a\u180E\u180E") == PieceList{"a", "\u180E", "\u180E"});
    CHECK(pieces_of(R"([\S\t])", "a\u180E\u180E \t") ==
          PieceList{"a", "\u180E", "\u180E", " ", "\t"});
    CHECK(pieces_of(R"(\w+)", "a_\u0301\u203F!\u00BD") ==
          PieceList{"a_\u0301\u203F", "!", "\u00BD"});
    CHECK(pieces_of(R"(\w+)", "\u24B6\u2163\u00B2!\u2460") ==
          PieceList{"\u24B6\u2163\u00B2", "!\u2460"});
    CHECK(pieces_of(R"([\w]+)", "\u24B6\u2163\u00B2!") == PieceList{"\u24B6\u2163", "\u00B2!"});
    // Scripts are not script extensions; names of properties are read loosely.
    CHECK(pieces_of(R"(\p{Han}+)", "\u4E2D\u3002\u56FD") ==
          PieceList{"\u4E2D", "\u3002", "\u56FD"});
    CHECK(pieces_of(R"(\p{^ han }|\P{ALPHA-betic})", "\u4E2D\u56FD1") ==
          PieceList{"\u4E2D\u56FD", "1"});
    // UTF-8 has no surrogates, so this is an empty set.
    CHECK(pieces_of(R"(\p{Cs})", "aB c12") == PieceList{"aB c12"});
    CHECK(pieces_of(R"(\P{Surrogate})", "a1 ") == PieceList{"a", "1", " "});
    CHECK(pieces_of(R"([\p{L}\p{Cs}]+)", "ab 1") == PieceList{"ab", " 1"});
    CHECK(pieces_of(R"([^\p{L}\p{Cs}]+)", "ab 1") == PieceList{"ab", " 1"});
    // Sets within sets, what sets have in common, and named classes.
    CHECK(pieces_of(R"([a-c[x-z]])", "abdxw") == PieceList{"a", "b", "d", "x", "w"});
    CHECK(pieces_of(R"([a-z&&[^aeiou]]+)", "abcde") == PieceList{"a", "bcd", "e"});
    CHECK(pieces_of(R"([^a-z&&[^aeiou]]+)", "bae1x") == PieceList{"b", "ae1", "x"});
    CHECK(pieces_of(R"([[:punct:]]+|\p{Punct})", "a$+!") == PieceList{"a", "$+!"});
    CHECK(pieces_of(R"([[:^alpha:]]+)", "a1!b") == PieceList{"a", "1!", "b"});
    CHECK(pieces_of(R"(\b'\b)", "a\u0301'\u0301'! 'b") == PieceList{"a\u0301", "'", "\u0301'! 'b"});
    CHECK(pieces_of(R"(\b')", "\u00b2' \u2460'") == PieceList{"\u00b2", "'", " \u2460'"});
    CHECK(pieces_of(R"(\B.)", "ab! '") == PieceList{"a", "b", "!", " ", "'"});
    CHECK(pieces_of(R"(\d)", "1\u0663\u00BD") == PieceList{"1", "\u0663", "\u00BD"});
    CHECK(pieces_of(R"(\h+)", "xyzFace 12") == PieceList{"xyz", "Face", " ", "12"});
    CHECK(pieces_of(R"(\v)", "a\v\n") == PieceList{"a", "\v", "\n"});
    CHECK(pieces_of(R"(\u00e9|\x{663}|\x41)", "\u00e9\u0663AB") ==
          PieceList{"\u00e9", "\u0663", "A", "B"});
    // Repetitions: {n,m}+ repeats, {n}? is optional, {,m} begins at 0, other braces are characters.
    CHECK(pieces_of(R"(\p{N}{1,3}+)", "12345678a") == PieceList{"12345678", "a"});
    CHECK(pieces_of(R"(a{2}?b)", "aabb") == PieceList{"aab", "b"});
    CHECK(pieces_of(R"(xa{,2}y)", "xaayxaaay") == PieceList{"xaay", "xaaay"});
    CHECK(pieces_of(R"((?:ab|c){1,2}+d)", "abcabd") == PieceList{"abcabd"});
    CHECK(pieces_of("a{b}", "a{b}c") == PieceList{"a{b}", "c"});
    CHECK(pieces_of("a++ab", "aab") == PieceList{"aab"});  // possessive: no match
    // Lines and dots.
    CHECK(pieces_of("x$", "xx\nx") == PieceList{"x", "x", "\n", "x"});
    CHECK(pieces_of("^x", "xx\nx") == PieceList{"x", "x\n", "x"});
    CHECK(pieces_of("(?m:.+)|b", "a\nb") == PieceList{"a\nb"});
    CHECK(pieces_of(".+", "a\n\rb") == PieceList{"a", "\n", "\rb"});
    // Letter case; a match sees what lies before it.
    CHECK(pieces_of("a(?i)b|c", "aBaCcC") == PieceList{"aB", "aC", "cC"});
    CHECK(pieces_of("(?i:ss|k)", "\u00DFsS\u1E9E\u212AK") ==
          PieceList{"\u00DF", "sS", "\u1E9E", "\u212A", "K"});
    CHECK(pieces_of("(?i)[\u00DF]", "sSs") == PieceList{"sS", "s"});
    CHECK(pieces_of("(?i)[^k]+", "a\u212Ab") == PieceList{"a", "\u212A", "b"});
    CHECK(pieces_of("(?i)'S|'(?-i:t)", "'s'T't'\u017F") == PieceList{"'s", "'T", "'t", "'\u017F"});
    CHECK(pieces_of("(?<=a)b", "bab") == PieceList{"ba", "b"});
    CHECK(pieces_of("(?#a comment)c", "abc") == PieceList{"ab", "c"});
    // Empty matches cut; a second pattern sees each piece alone.
    CHECK(pieces_of("(?=[A-Z])", "aBcD") == PieceList{"a", "Bc", "D"});
    CHECK(pieces_of(PieceList{R"(\d)", R"(\s+(?!\S)|\s+)"}, "a  1  b") ==
          PieceList{"a", "  ", "1", " ", " ", "b"});
    CHECK(pieces_of(escape_regex("a.[b]|{1}\\$^"), "xa.[b]|{1}\\$^y") ==
          PieceList{"x", "a.[b]|{1}\\$^", "y"});
}

TEST_CASE("a byte that is not UTF-8 is a character, and pieces keep the bytes") {
    CHECK(pieces_of(R"(\p{So}+)", "a\xFF\xFE\uFFFD\xC3z") ==
          PieceList{"a", "\xFF\xFE\uFFFD\xC3", "z"});
    for (int round = 0; round < 200; ++round) {
        const std::string text = random_bytes(static_cast<size_t>(random_int(0, 200)));
        std::string joined;
        for (const std::string& piece : pieces_of(std::string(o200k_regex), text)) {
            CHECK_FALSE(piece.empty());
            joined += piece;
        }
        CHECK(joined == text);
    }
}

TEST_CASE("long pieces take memory in proportion, and endless searches an error") {
    const std::string spaces(3'000'000, ' '), letters(3'000'000, 'a');
    CHECK(pieces_of(std::string(o200k_regex), spaces + "b").size() == 2);
    CHECK(pieces_of(std::string(o200k_regex), letters).size() == 1);
    CHECK(pieces_of("(?:a|b)+", letters).size() == 1);
    CHECK(contains(error_of([] { pieces_of("(?:a+)+$", std::string(60, 'a') + "b"); }),
                   "takes too long"));
}

TEST_CASE("patterns that are malformed or not supported are refused") {
    for (const auto& [pattern, says] : std::initializer_list<std::pair<const char*, const char*>>{
             {"(", "PCRE2 says"},
             {"a)", ") without a ("},
             {"*a", "repeats nothing"},
             {"(*UTF8)a", "repeats nothing"},
             {"[a", "[ without a ]"},
             {"[[:word]", "[ without a ]"},
             {"[[:vowel:]]", "[:vowel:]"},
             {"[a-\\d]", "ends in a class"},
             {"[\\d-a]", "begins with a class"},
             {"[b-a]", "empty range"},
             {"(.)\\1", "refers back"},
             {"\\X", "\\X"},
             {"\\xe9", "not UTF-8"},
             {"[]a]", "begins with ]"},
             {"\\Ga", "\\G"},
             {"\\", "backslash"},
             {"\\u00", "code point"},
             {"\\x{zz}", "code point"},
             {"\\pL", "property"},
             {"\\p{Unheard}", "the property Unheard"},
             {"\\p{Script=Han}", "the property Script=Han"},
             {"\\p{=word}", "the property =word"},
             {"(?x:a b)", "(?x"},
             {"(?~a)", "(?~"}}) {
        CAPTURE(pattern);
        CHECK(contains(error_of([&, text = pattern] { Splitter({text}); }), says));
        json file = trained_json();
        file["pre_tokenizer"] = {
            {"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}},
              {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
        const std::string message = error_of_json(file);
        CHECK(contains(message, "tokenizer.json"));
        CHECK(contains(message, says));
    }
}

TEST_CASE("a Split that drops text is refused, and so are normalizers besides NFC") {
    json file = trained_json();
    const auto set = [&](const char* behavior, bool invert, const std::string& regex) {
        file["pre_tokenizer"] = {
            {"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Split"},
               {"pattern", {{"Regex", regex}}},
               {"behavior", behavior},
               {"invert", invert}},
              {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
        return error_of_json(file);
    };
    CHECK(set("Removed", true, std::string(o200k_regex)).empty());
    CHECK(contains(set("Removed", true, R"(\w+)"), "Removed"));
    CHECK(contains(set("Removed", true, R"(\p{N}{1,3})"), "Removed"));
    CHECK(contains(set("Removed", false, std::string(o200k_regex)), "Removed"));
    CHECK(contains(set("MergedWithNext", false, R"(\w+)"), "MergedWithNext"));
    file = trained_json();
    file["normalizer"] = {{"type", "Sequence"},
                          {"normalizers", {{{"type", "NFC"}}, {{"type", "Lowercase"}}}}};
    CHECK(contains(error_of_json(file), "Lowercase"));
    file["normalizer"] = {{"type", "NFC"}};
    CHECK(error_of_json(file).empty());
    file["added_tokens"].push_back(
        {{"id", 700}, {"content", "e\u0301"}, {"normalized", true}, {"special", false}});
    CHECK(contains(error_of_json(file), "normalizer"));
}

TEST_CASE("normalisation form C composes, orders marks, and keeps what is not UTF-8") {
    std::string storage;
    for (const auto& [text, expected] : std::initializer_list<std::pair<std::string, std::string>>{
             {"plain ASCII\n", "plain ASCII\n"},
             {"e\u0301", "\u00e9"},
             {"xe\u0301y\u0308z", "x\u00e9\u00ffz"},
             {"\u212B \u2126 \u00C5", "\u00C5 \u03A9 \u00C5"},
             {"q\u0307\u0323", "q\u0323\u0307"},
             {"\u1100\u1161\u11A8", "\uAC01"},
             {"\u0958", "\u0915\u093C"},
             {"\uFB01", "\uFB01"},
             {"e\xFF\u0301", "e\xFF\u0301"},
             {"\u0301", "\u0301"},
             {"a\n\u0301", "a\n\u0301"},
             {std::string("e\0\u0301", 4), std::string("e\0\u0301", 4)}}) {
        CAPTURE(text);
        CHECK(nfc(text, storage) == expected);
    }
    for (int round = 0; round < 200; ++round) {
        std::string text = random_bytes(static_cast<size_t>(random_int(0, 100))), again;
        const std::string once(nfc(text, storage));
        CHECK(nfc(once, again) == once);
        CHECK(count_not_utf8(once) == count_not_utf8(text));
    }
}

TEST_CASE("which tokens begin and end a document is read from the post-processor") {
    const json plain = with_special({{"<s>", 700}, {"</s>", 701}});
    CHECK(load_published(plain).begin_of_text() == std::nullopt);
    CHECK(load_published(plain).end_of_text() == 699u);
    CHECK(load_published(plain).document_boundary() == 699u);
    json file = plain;
    const auto read = [&](const json& single, const json& pair) {
        file["post_processor"] = {
            {"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}};
        const Tokenizer tokenizer = load_published(file);
        const Tokenizer again = load_published(json::parse(tokenizer.to_json()));
        CHECK(again.begin_of_text() == tokenizer.begin_of_text());
        CHECK(again.end_of_text() == tokenizer.end_of_text());
        return std::pair(tokenizer.begin_of_text(), tokenizer.end_of_text());
    };
    using Both = std::pair<std::optional<uint32_t>, std::optional<uint32_t>>;
    const json A = sequence("A"), B = sequence("B"), s = special("<s>"), e = special("</s>");
    CHECK(read({s, A}, {s, A, s, B}) == Both(700u, 699u));
    CHECK(read({s, A, e}, {s, A, e, s, B, e}) == Both(700u, 701u));
    CHECK(read(json::array({A}), {A, e, B}) == Both(std::nullopt, 701u));
    CHECK(read({s, A}, {s, A, e, s, B}) == Both(700u, 701u));
    CHECK(read({s, e, A}, {A, B}) == Both(std::nullopt, 699u));  // two tokens are something else
    CHECK(read({special("<unknown>"), A}, {A, B}) == Both(std::nullopt, 699u));

    file["post_processor"] = {
        {"type", "Sequence"},
        {"processors",
         {{{"type", "ByteLevel"}},
          {{"type", "RobertaProcessing"}, {"cls", {"<s>", 700}}, {"sep", {"</s>", 701}}}}}};
    CHECK(load_published(file).begin_of_text() == 700u);
    CHECK(load_published(file).end_of_text() == 701u);
    file["post_processor"] = {
        {"type", "TemplateProcessing"}, {"single", json::array({1})}, {"pair", json::array()}};
    CHECK(contains(error_of_json(file), "template"));
}

TEST_CASE("tokenizer_config.json names the tokens that begin and end a document") {
    const json plain = with_special({{"<s>", 700}, {"</s>", 701}});
    json with_template = plain;
    with_template["post_processor"] = {{"type", "TemplateProcessing"},
                                       {"single", {special("<s>"), sequence("A")}},
                                       {"pair", {sequence("A"), sequence("B")}}};
    const auto end = [&](const json& config) {
        return load_published(plain, config).end_of_text();
    };
    CHECK(end({{"eos_token", "</s>"}}) == 701u);
    CHECK(end({{"eos_token", {{"content", "</s>"}}}}) == 701u);
    CHECK(end({{"eos_token", nullptr}}) == 699u);
    CHECK(end({{"eos_token", "<gone>"}}) == 699u);
    const auto begin = [&](const json& file, const json& config) {
        return load_published(file, config).begin_of_text();
    };
    CHECK(begin(plain, {{"bos_token", "<s>"}}) == std::nullopt);
    CHECK(begin(plain, {{"bos_token", "<s>"}, {"add_bos_token", true}}) == 700u);
    CHECK(begin(with_template, {{"bos_token", "<s>"}}) == 700u);
    CHECK(begin(with_template, {{"bos_token", "<s>"}, {"add_bos_token", false}}) == std::nullopt);
    CHECK(
        contains(error_of([&] { load_published(plain, json::array()); }), "tokenizer_config.json"));
    CHECK(contains(error_of([&] { load_published(plain, {{"eos_token", 7}}); }), "eos_token"));
}

TEST_CASE("a rank file of GPT-4o's vocabulary is cut by its pattern") {
    const TemporaryDirectory folder;
    const MappedFile ranks(fixture_path("cl100k_odd.tiktoken"));
    write_file(folder / "o200k_odd.tiktoken", ranks.text());
    const Tokenizer tokenizer = Tokenizer::load(folder.path());
    CHECK(tokenizer.patterns() == std::vector{std::string(o200k_regex)});
    CHECK(tokenizer.end_of_text() == 700u);
    CHECK(load_published(json::parse(tokenizer.to_json())).encode("Don'T/\n") ==
          tokenizer.encode("Don'T/\n"));
}

namespace {

std::string base64(std::string_view bytes) {
    constexpr std::string_view digits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string text;
    for (size_t at = 0; at < bytes.size(); at += 3) {
        uint32_t bits = 0;
        for (size_t i = 0; i < 3; ++i)
            bits = bits << 8 | (at + i < bytes.size() ? static_cast<uint8_t>(bytes[at + i]) : 0u);
        for (size_t i = 0; i < 4; ++i)
            text += at + i > bytes.size() ? '=' : digits[bits >> (18 - 6 * i) & 63];
    }
    return text;
}

/// The lines of a rank file: all bytes, then tokens of three bytes, up to id n - 1; none has the id
/// `gap`.
std::string rank_file(uint32_t n, std::optional<uint32_t> gap = {}) {
    std::string lines;
    for (uint32_t id = 0; id < n; ++id) {
        std::string token(1, static_cast<char>(id));
        if (id >= 256) token += {static_cast<char>(id >> 8), static_cast<char>(id >> 16)};
        if (id != gap) lines += concat(base64(token), " ", id, "\n");
    }
    return lines;
}

}  // namespace

TEST_CASE("a rank file's name and size say which special tokens it has") {
    using Special = std::map<uint32_t, std::string>;
    const auto n = static_cast<uint32_t>(random_int(300, 400)),
               gap = static_cast<uint32_t>(random_int(256, n - 2));
    const TemporaryDirectory folder;
    const auto check = [&](const std::string& name, const std::string& ranks,
                           const Special& expected) {
        write_file(folder / name, ranks);
        const Tokenizer tokenizer = Tokenizer::load(folder / name);
        CAPTURE(name, n, gap);
        Special found;
        for (uint32_t id = 0; id < tokenizer.vocab_size(); ++id)
            if (tokenizer.is_special(id)) found[id] = std::string(tokenizer.token_bytes(id));
        CHECK(found == expected);
        CHECK(tokenizer.end_of_text() == expected.begin()->first);
    };
    const Special at_end{{n, "<|endoftext|>"}}, in_gap{{gap, "<|endoftext|>"}};
    for (const char* name : {"r50k_base", "p50k_base", "gpt2", "cl100k_x", "o200k_x"}) {
        check(concat(name, ".tiktoken"), rank_file(n), at_end);
        check(concat(name, ".tiktoken"), rank_file(n, gap), in_gap);
    }
    // As OpenAI publishes them
    check("cl100k_base.tiktoken", rank_file(100256),
          {{100257, "<|endoftext|>"},
           {100258, "<|fim_prefix|>"},
           {100259, "<|fim_middle|>"},
           {100260, "<|fim_suffix|>"},
           {100276, "<|endofprompt|>"}});
    check("o200k_base.tiktoken", rank_file(199998),
          {{199999, "<|endoftext|>"}, {200018, "<|endofprompt|>"}});
}

TEST_CASE("the tokens around documents can be chosen, and a prompt begins with one") {
    const Tokenizer plain = load_published(with_special({{"<s>", 700}, {"</s>", 701}}));
    const Tokenizer chosen = plain.with_document_tokens("<s>", "</s>");
    CHECK(chosen.begin_of_text() == 700u);
    CHECK(chosen.end_of_text() == 701u);
    CHECK(chosen.document_boundary() == 700u);
    const Tokenizer again = load_published(json::parse(chosen.to_json()));
    CHECK(again.begin_of_text() == 700u);
    CHECK(again.end_of_text() == 701u);
    CHECK(chosen.with_document_tokens("", "").to_json() == chosen.to_json());
    CHECK(chosen.with_document_tokens("none", "<|endoftext|>").to_json() == plain.to_json());
    CHECK(contains(error_of([&] { plain.with_document_tokens("<x>", ""); }),
                   "<|endoftext|>, <s>, </s>"));

    Ids expected = plain.encode("a text");
    CHECK(plain.encode_beginning("a text") == expected);
    CHECK(plain.encode_beginning("") == Ids{699});
    expected.insert(expected.begin(), 700);
    CHECK(chosen.encode_beginning("a text") == expected);
    CHECK(chosen.encode_beginning("") == Ids{700});
}

}  // namespace train_gpt
