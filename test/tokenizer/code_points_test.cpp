// Texts are cut as Hugging Face's tokenizers cut them, whatever versions of PCRE2 and utf8proc
// there are: around every code point, and by random patterns.
#include <thread>

#include "base/error.h"
#include "test/catch.h"
#include "test/text.h"
#include "test/tokenizer/reference.h"
#include "test/utf8.h"
#include "tokenizer/formats.h"
#include "tokenizer/nfc.h"
#include "tokenizer/splitter.h"
#include "tokenizer/unicode.h"

namespace train_gpt {

namespace {

using nlohmann::json;

constexpr char32_t block_size = 4096;
constexpr size_t blocks = CodePoints::limit / block_size;

/// The texts of scripts/pattern_fixtures.py.
std::vector<std::string> texts_of(size_t block) {
    std::vector<std::string> texts;
    const bool thorough = block < 0x40 || block == 0xE0;
    std::string spaced, dotted, lines;
    for (char32_t i = 0; i < block_size; ++i) {
        const char32_t code = static_cast<char32_t>(block) * block_size + i;
        if (code >= 0xD800 && code < 0xE000) continue;
        const std::string c = utf8(code);
        if (!thorough) {
            spaced += c + " x7."[i % 4];
            continue;
        }
        texts.push_back(c);
        spaced += " " + c + "x" + c + "7" + c;
        dotted += "." + c + "\u0301" + c;
        lines += "\n" + c + "\n" + c + c;
    }
    texts.push_back(spaced);
    if (thorough) texts.insert(texts.end(), {dotted, lines});
    return texts;
}

std::string short_hash(std::string_view text) { return hash_text(text).substr(0, 8); }

/// The lengths of the pieces of texts, a byte each.
std::string lengths(const Splitter& splitter, Splitter::Scratch& scratch, std::string_view text) {
    std::string result;
    splitter.split(text, scratch, [&](size_t, size_t length) {
        result += static_cast<char>(std::min<size_t>(length, 255));
    });
    return result;
}

/// The blocks whose texts are cut differently.
std::vector<size_t> differing_blocks(const std::string& hashes, const TokenizerDefinition& way,
                                     const std::vector<std::vector<std::string>>& texts) {
    const Splitter splitter(way.patterns);
    Splitter::Scratch scratch;
    std::vector<size_t> differing;
    std::string normal;
    for (size_t block = 0; block < blocks; ++block) {
        std::string all;
        for (const std::string& text : texts[block])
            all += lengths(splitter, scratch, way.nfc ? nfc(text, normal) : std::string_view(text));
        if (short_hash(all) != hashes.substr(8 * block, 8)) differing.push_back(block);
    }
    return differing;
}

std::vector<std::vector<std::string>> all_texts() {
    std::vector<std::vector<std::string>> texts;
    for (size_t block = 0; block < blocks; ++block) texts.push_back(texts_of(block));
    return texts;
}

}  // namespace

TEST_CASE("around every code point, text is cut as Hugging Face's tokenizers cut it") {
    const json fixture = read_fixture("code_points.json");
    const auto texts = all_texts();
    struct Way {
        std::string name, hashes;
        TokenizerDefinition definition;
        std::vector<size_t> differing;
    };
    std::vector<Way> ways;
    for (const auto& [name, parts] : fixture.at("ways").items()) {
        json file = read_fixture("trained.json");
        for (const char* part : {"pre_tokenizer", "normalizer"}) file[part] = parts.at(part);
        const TemporaryDirectory folder;
        write_file(folder / "tokenizer.json", file.dump());
        ways.push_back(
            {name, parts.at("hashes"), read_tokenizer_json(folder / "tokenizer.json"), {}});
    }
    REQUIRE(ways.size() == 20);
    std::vector<std::thread> threads;
    for (size_t first = 0; first < 2; ++first)
        threads.emplace_back([&, first] {
            for (size_t i = first; i < ways.size(); i += 2)
                ways[i].differing = differing_blocks(ways[i].hashes, ways[i].definition, texts);
        });
    for (std::thread& thread : threads) thread.join();
    for (const Way& way : ways) {
        CAPTURE(way.name, way.definition.patterns);
        CHECK(way.differing == std::vector<size_t>());
    }
}

TEST_CASE("every code point is normalised as Hugging Face's tokenizers do it") {
    const json fixture = read_fixture("code_points.json");
    std::string normal;
    std::vector<size_t> differing;
    for (size_t block = 0; block < blocks; ++block) {
        std::string all;
        for (const std::string& text : texts_of(block)) all += nfc(text, normal);
        if (short_hash(all) != fixture.at("nfc").get<std::string>().substr(8 * block, 8))
            differing.push_back(block);
    }
    CHECK(differing == std::vector<size_t>());
    const std::string decomposed = fixture.at("decomposed");
    CHECK(short_hash(nfc(decomposed, normal)) == fixture.at("composed").get<std::string>());
    // A letter and a mark that were added after Unicode 9.0.
    CHECK(nfc("\U000105D2\u0307 q\u0345\u0897", normal) == "\U000105D2\u0307 q\u0345\u0897");
}

TEST_CASE("random patterns cut as Oniguruma cuts by them") {
    const json fixture = read_fixture("random_patterns.json");
    REQUIRE(fixture.at("patterns").size() == 300);
    for (const json& each : fixture.at("patterns")) {
        const std::string pattern = each.at("pattern");
        const Splitter splitter({pattern});
        Splitter::Scratch scratch;
        for (size_t i = 0; i < each.at("strings").size(); ++i) {
            const std::string text = each.at("strings")[i];
            std::vector<size_t> pieces;
            splitter.split(text, scratch, [&](size_t, size_t length) { pieces.push_back(length); });
            CAPTURE(pattern, text);
            CHECK(pieces == each.at("pieces")[i].get<std::vector<size_t>>());
        }
    }
}

TEST_CASE("ten million equal characters are cut in one go") {
    const std::string gpt2 = "(?:" + regex_of(Pattern::gpt2) + ")";  // not our own code
    for (const auto& [pattern, character] : std::initializer_list<std::pair<std::string, char>>{
             {std::string(o200k_regex), ' '},
             {std::string(o200k_regex), 'A'},
             {gpt2, ' '},
             {gpt2, '7'},
             {R"(\w+|\s+(?!\S)|[^\w\s]+|\s+)", '\n'},
             {"(?: |a)+", ' '}}) {
        const std::string run(10'000'000, character);
        const Splitter splitter({pattern});
        Splitter::Scratch scratch;
        size_t pieces = 0, end = 0;
        splitter.split(run, scratch, [&](size_t at, size_t length) {
            ++pieces;
            end = at + length;
        });
        CAPTURE(pattern, character);
        CHECK(end == run.size());
        CHECK(pieces == 1);
    }
}

TEST_CASE("sets of code points are joined, intersected and complemented") {
    for (int round = 0; round < 200; ++round) {
        const auto random_set = [] {
            std::vector<bool> in(40);
            CodePoints set;
            for (int64_t ranges = random_int(0, 5); ranges > 0; --ranges) {
                const auto first = static_cast<char32_t>(random_int(0, 39));
                const auto last = static_cast<char32_t>(random_int(first, 39));
                set.add({first, last});
                for (char32_t code = first; code <= last; ++code) in[code] = true;
            }
            return std::pair(set, in);
        };
        const auto [a, in_a] = random_set();
        const auto [b, in_b] = random_set();
        CodePoints both = a;
        both.add(b);
        const CodePoints common = a.intersection(b), rest = a.complement();
        for (char32_t code = 0; code < 40; ++code) {
            REQUIRE(a.contains(code) == in_a[code]);
            REQUIRE(both.contains(code) == (in_a[code] || in_b[code]));
            REQUIRE(common.contains(code) == (in_a[code] && in_b[code]));
            REQUIRE(rest.contains(code) == !in_a[code]);
        }
        REQUIRE(rest.contains(CodePoints::limit - 1));
        REQUIRE_FALSE(a.contains(CodePoints::limit - 1));
        REQUIRE(rest.complement() == a);
        REQUIRE(rest.intersection(a).empty());
    }
}

}  // namespace train_gpt
