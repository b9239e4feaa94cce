#include "dataloader/prepare.h"

#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <set>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <unistd.h>

#include "dataloader/documents.h"
#include "dataloader/manifest.h"
#include "test/dataloader/shard_files.h"
#include "test/sorted_json.h"
#include "test/text.h"
#include "test/tokenizer/reference.h"
#include "tokenizer/pretokenize.h"
#include "tokenizer/splitter.h"
#include "tokenizer/tokenizer.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

/// Words of few letters, so that byte pairs repeat, with everything between them that text may
/// contain.
std::string random_text(size_t bytes) {
    static const std::vector<std::string> gaps{" ",
                                               " ",
                                               " ",
                                               " ",
                                               " ",
                                               " ",
                                               "\n",
                                               "\n",
                                               "\n",
                                               "\n\n",
                                               "\r\n",
                                               "  ",
                                               "\t",
                                               " \n",
                                               "\n ",
                                               ".\n",
                                               ". ",
                                               "/\n/",
                                               ",\n'",
                                               "'s",
                                               "\xC2\xA0",
                                               "\n\xE3\x80\x80",
                                               "\xE3\x80\x82\n",
                                               "\xE2\x80\xA8\n",
                                               "12\n345",
                                               std::string(1, '\0'),
                                               "\xFF\n\x80",
                                               "\n\xE2\x82\xAC",
                                               "\xF0\x9F\x98\x80\n",
                                               "\xC3\n"};
    static const std::vector<std::string> letters{"a", "b", "c", "A", "\xC3\xA9", "\xE4\xB8\xAD",
                                                  "7"};
    std::string text;
    while (text.size() < bytes) {
        for (int64_t n = random_int(1, 5); n > 0; --n)
            text += letters[static_cast<size_t>(
                random_int(0, static_cast<int64_t>(letters.size()) - 1))];
        text += gaps[static_cast<size_t>(random_int(0, static_cast<int64_t>(gaps.size()) - 1))];
    }
    return text;
}

/// All tokens of a split, from its shards.
std::vector<uint32_t> tokens_of(const std::string& glob, uint32_t vocab_size) {
    const TokenShards shards(glob, vocab_size);
    std::vector<uint32_t> tokens;
    for (int i = 0; i < shards.shard_count(); ++i) {
        std::vector<int32_t> part(static_cast<size_t>(shards.shard_tokens(i)));
        shards.copy(i, 0, shards.shard_tokens(i), part.data());
        tokens.insert(tokens.end(), part.begin(), part.end());
    }
    return tokens;
}

/// The documents that the tokens decode to; the last is what follows the last end of text.
std::vector<std::string> documents_of(const Tokenizer& tokenizer,
                                      const std::vector<uint32_t>& tokens) {
    std::vector<std::string> documents{""};
    size_t begin = 0;
    for (size_t i = 0; i <= tokens.size(); ++i) {
        const bool end = i < tokens.size() && tokens[i] == tokenizer.end_of_text();
        if (!end && i < tokens.size()) continue;
        documents.back() = tokenizer.decode(std::span(tokens).subspan(begin, i - begin));
        begin = i + 1;
        if (end) documents.emplace_back();
    }
    return documents;
}

std::string join(const std::vector<std::string>& parts) {
    std::string all;
    for (const std::string& part : parts) all += part;
    return all;
}

std::vector<std::string> names_in(const fs::path& folder) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder))
        names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
}

/// Every file of a folder with its bytes, to check that nothing changed.
std::vector<std::pair<std::string, std::string>> contents(const fs::path& folder) {
    std::vector<std::pair<std::string, std::string>> all;
    for (const std::string& name : names_in(folder)) all.emplace_back(name, read(folder / name));
    return all;
}

PrepareOptions plain_options(const std::vector<std::string>& texts, const std::string& out) {
    PrepareOptions options;
    options.texts = texts;
    options.train_vocab = 300;
    options.out = out;
    options.val_fraction = 0.1;
    options.val_split = "tail";
    options.shard_tokens = 5000;
    return options;
}

}  // namespace

TEST_CASE(
    "the shards of a prepared folder decode to the text, the last part of it validation only") {
    const TemporaryDirectory folder;
    const std::string out = folder / "new/data";
    const std::vector<std::string> parts{random_text(30000), random_text(20000),
                                         random_text(25000)};
    write(folder / "a.txt", parts[0]);
    write(folder / "b.txt", parts[1]);
    write(folder / "c.txt", parts[2]);
    write(folder / "empty.txt", "");
    const auto options = plain_options(
        {folder / "a.txt", folder / "b.txt", folder / "empty.txt", folder / "c.txt"}, out);
    prepare(options, nullptr);

    const Tokenizer tokenizer = Tokenizer::load(out + "/tokenizer.json");
    REQUIRE(tokenizer.end_of_text().has_value());
    const auto vocab_size = tokenizer.vocab_size();
    const auto train_tokens = tokens_of(out + "/train_*.bin", vocab_size);
    const auto val_tokens = tokens_of(out + "/val_*.bin", vocab_size);
    const auto train = documents_of(tokenizer, train_tokens),
               val = documents_of(tokenizer, val_tokens);
    REQUIRE(train.size() == 3);  // the third one is split
    REQUIRE(val.size() == 2);
    CHECK(train[0] == parts[0]);
    CHECK(train[1] == parts[1]);
    CHECK(train[2] + val[0] == parts[2]);
    CHECK(val[1].empty());
    CHECK(train[2].back() == '\n');
    const double fraction =
        static_cast<double>(val[0].size()) / static_cast<double>(join(parts).size());
    CHECK(fraction > 0.05);
    CHECK(fraction < 0.15);

    // The tokenizer was trained on the training part only.
    const std::vector<std::string_view> seen(train.begin(), train.end());
    Tokenizer::train(seen, options.train_vocab).save(folder / "expected.json");
    CHECK(read(out + "/tokenizer.json") == read(folder / "expected.json"));

    const DataManifest manifest = read_data_manifest(out);
    CHECK(manifest.complete);
    CHECK(manifest.vocab_size == vocab_size);
    CHECK(manifest.tokenizer_hash == hash_file(out + "/tokenizer.json"));
    CHECK(manifest.val_fraction == 0.1);
    REQUIRE(manifest.sources.size() == 4);
    CHECK(manifest.sources[1].path == folder / "b.txt");
    CHECK(manifest.sources[1].bytes == static_cast<int64_t>(parts[1].size()));
    CHECK(manifest.sources[1].hash == hash_file(folder / "b.txt"));
    std::vector<std::string> names{"data.json", "tokenizer.json"};
    int64_t train_count = 0, val_count = 0, train_bytes = 0, val_bytes = 0;
    for (const PreparedShard& shard : manifest.shards) {
        names.push_back(shard.name);
        const TokenShards file(out + "/" + shard.name, vocab_size);
        CHECK(file.total_tokens() == shard.tokens);
        CHECK(shard.tokens <= options.shard_tokens);
        CHECK(hash_file(out + "/" + shard.name) == shard.hash);
        CHECK(static_cast<int64_t>(
                  join(documents_of(tokenizer, tokens_of(out + "/" + shard.name, vocab_size)))
                      .size()) == shard.bytes);
        (shard.split == "val" ? val_count : train_count) += shard.tokens;
        (shard.split == "val" ? val_bytes : train_bytes) += shard.bytes;
    }
    std::sort(names.begin(), names.end());
    CHECK(names_in(out) == names);
    CHECK(train_count == static_cast<int64_t>(train_tokens.size()));
    CHECK(val_count == static_cast<int64_t>(val_tokens.size()));
    CHECK(train_bytes == static_cast<int64_t>(join(train).size()));
    CHECK(val_bytes == static_cast<int64_t>(join(val).size()));
}

TEST_CASE(
    "encoding a long document in pieces on threads gives the tokens of the whole, the same each "
    "time") {
    const TemporaryDirectory folder;
    const std::string text = random_text(3'500'000);
    write(folder / "long.txt", text);
    write(folder / "short.txt", text.substr(0, 20000));
    prepare(plain_options({folder / "short.txt"}, folder / "small"), nullptr);

    PrepareOptions options = plain_options({folder / "long.txt"}, folder / "one");
    options.train_vocab = 0;
    options.tokenizer = folder / "small";
    options.val_fraction = 0;
    options.shard_tokens = 1'000'000;
    prepare(options, nullptr);
    const Tokenizer tokenizer = Tokenizer::load(folder / "small");
    auto expected = tokenizer.encode(text);
    expected.push_back(*tokenizer.end_of_text());
    CHECK((tokens_of(folder / "one/train_*.bin", tokenizer.vocab_size()) == expected));
    CHECK(!fs::exists(folder / "one/val_000000.bin"));

    options.out = folder / "two";
    prepare(options, nullptr);
    CHECK((contents(folder / "one") == contents(folder / "two")));
}

TEST_CASE("a vocabulary that puts a space before each text does so once a document") {
    const TemporaryDirectory folder;
    const std::string text = "x\n" + random_text(2'500'000);
    write(folder / "long.txt", text);
    write(folder / "short.txt", text.substr(0, 20000));
    prepare(plain_options({folder / "short.txt"}, folder / "small"), nullptr);
    std::string json = read(folder / "small/tokenizer.json");
    const std::string off = "\"add_prefix_space\": false", on = "\"add_prefix_space\": true";
    REQUIRE(contains(json, off));
    for (size_t at; (at = json.find(off)) != std::string::npos;) json.replace(at, off.size(), on);
    write(folder / "prefix.json", json);

    PrepareOptions options = plain_options({folder / "long.txt"}, folder / "out");
    options.train_vocab = 0;
    options.tokenizer = folder / "prefix.json";
    options.val_fraction = 0;
    prepare(options, nullptr);
    const Tokenizer tokenizer = Tokenizer::load(folder / "prefix.json");
    CHECK((documents_of(tokenizer, tokens_of(folder / "out/train_*.bin", tokenizer.vocab_size())) ==
           std::vector<std::string>{" " + text, ""}));
}

TEST_CASE("a document is not cut if its tokenizer's pattern is unknown") {
    const TemporaryDirectory folder;
    SortedJson file = read_fixture("trained.json");
    // A word is one piece if a space follows, so that text must not be cut between them.
    file["pre_tokenizer"] = {
        {"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"}, {"pattern", {{"Regex", R"(qz(?=\s)|.)"}}}, {"behavior", "Isolated"}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
    file["model"]["vocab"]["qz"] = 700;
    file["model"]["merges"].push_back({"q", "z"});
    write(folder / "tokenizer.json", file.dump());
    const Tokenizer tokenizer = Tokenizer::load(folder.path());
    REQUIRE(tokenizer.encode("qz ").size() == 2);
    REQUIRE(tokenizer.encode("qz").size() == 2);
    std::string text;
    while (text.size() < 2'500'000) text += "qz ";
    write(folder / "a.txt", text);
    PrepareOptions options = plain_options({folder / "a.txt"}, folder / "out");
    options.train_vocab = 0;
    options.tokenizer = folder / "tokenizer.json";
    options.val_split = "";
    options.val_fraction = 0;
    options.shard_tokens = 10'000'000;
    prepare(options, nullptr);
    std::vector<uint32_t> expected = tokenizer.encode(text);
    expected.push_back(*tokenizer.end_of_text());
    CHECK((tokens_of(folder / "out/train_*.bin", tokenizer.vocab_size()) == expected));
}

TEST_CASE("documents begin and end with the tokens that the tokenizer or the user names") {
    const TemporaryDirectory folder;
    SortedJson file = read_fixture("trained.json");
    for (const auto& [text, id] : {std::pair("<s>", 700), std::pair("</s>", 701)})
        file["added_tokens"].push_back({{"id", id}, {"content", text}, {"special", true}});
    write(folder / "plain.json", file.dump());
    const Tokenizer plain = Tokenizer::load(folder / "plain.json");

    std::vector<std::string> documents;
    std::string lines;
    for (int i = 0; i < 20; ++i) {
        // One of them goes out in pieces.
        documents.push_back(random_text(i == 7 ? 2'500'000 : 200) + "z");
        lines += documents.back() + "\n<|endoftext|>\n";
    }
    write(folder / "a.txt", lines);
    PrepareOptions options = plain_options({folder / "a.txt"}, folder / "out");
    options.train_vocab = 0;
    options.tokenizer = folder / "plain.json";
    options.val_split = "";
    options.val_fraction = 0;
    options.shard_tokens = 10'000'000;
    const auto prepared = [&](std::optional<uint32_t> begin, uint32_t end) {
        prepare(options, nullptr);
        const Tokenizer written = Tokenizer::load(folder / "out");
        CHECK(written.begin_of_text() == begin);
        CHECK(written.end_of_text() == end);
        std::vector<uint32_t> expected;
        for (const std::string& document : documents) {
            if (begin) expected.push_back(*begin);
            const auto tokens = plain.encode(document + "\n");
            expected.insert(expected.end(), tokens.begin(), tokens.end());
            expected.push_back(end);
        }
        CHECK((tokens_of(folder / "out/train_*.bin", 702) == expected));
        // The special tokens stand for no bytes of text.
        int64_t bytes = 0;
        for (const PreparedShard& shard : read_data_manifest(folder / "out").shards)
            bytes += shard.bytes;
        CHECK(bytes == static_cast<int64_t>(lines.size() - 20 * std::strlen("<|endoftext|>\n")));
        fs::remove_all(folder / "out");
    };
    prepared({}, 699);
    options.begin_token = "<s>";
    options.end_token = "</s>";
    prepared(700, 701);
    options.end_token = "";
    prepared(700, 699);
    // So does a long document that is read whole first, since its hash decides its split.
    options.val_fraction = 0.5;
    prepare(options, nullptr);
    std::multiset<std::vector<uint32_t>> read, expected;
    for (const std::string& document : documents) {
        std::vector<uint32_t> tokens = plain.encode(document + "\n");
        tokens.insert(tokens.begin(), 700);
        expected.insert(std::move(tokens));
    }
    for (const char* split : {"out/train_*.bin", "out/val_*.bin"})
        for (std::vector<uint32_t> all = tokens_of(folder / split, 702); !all.empty();) {
            const auto end = std::ranges::find(all, 699u);
            REQUIRE(end != all.end());
            read.insert({all.begin(), end});
            all.erase(all.begin(), end + 1);
        }
    CHECK((read == expected));
    fs::remove_all(folder / "out");
    options.val_fraction = 0;
    // As the files say, unless the user says otherwise.
    options.tokenizer = folder / "named.json";
    plain.with_document_tokens("<s>", "</s>").save(folder / "named.json");
    options.begin_token = "";
    prepared(700, 701);
    options.begin_token = "none";
    prepared({}, 701);
    options.begin_token = "<x>";
    CHECK(contains(error_of([&] { prepare(options, nullptr); }), "<x>"));
    options.tokenizer = "";
    options.train_vocab = 300;
    CHECK(contains(error_of([&] { prepare(options, nullptr); }), "--begin-token"));
}

namespace {

std::string utf8_of(uint32_t c) {
    const auto byte = [](uint32_t bits) { return static_cast<char>(bits); };
    const auto next = [&](int shift) { return byte(0x80 | (c >> shift & 0x3F)); };
    if (c < 0x80) return {byte(c)};
    if (c < 0x800) return {byte(0xC0 | c >> 6), next(0)};
    if (c < 0x10000) return {byte(0xE0 | c >> 12), next(6), next(0)};
    return {byte(0xF0 | c >> 18), next(12), next(6), next(0)};
}

}  // namespace

TEST_CASE("texts are cut after a line break only between characters that are not white space",
          "[tokenize]") {
    const auto is_white_space = [](uint32_t c) {  // the property White_Space of Unicode
        return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
               (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
               c == 0x205F || c == 0x3000;
    };
    int cuts = 0;
    for (uint32_t c = 0; c < 0x110000; ++c) {
        if (c >= 0xD800 && c < 0xE000) continue;
        const std::string character = utf8_of(c);
        const bool before = is_encodable_cut("a\n" + character + "b", 2),
                   after = is_encodable_cut(character + "\nb", character.size() + 1);
        cuts += before + after;
        if (!is_white_space(c) || !(before || after)) continue;
        CAPTURE(c, before, after);
        REQUIRE_FALSE(is_white_space(c));
    }
    CHECK(cuts > 2000000);
}

TEST_CASE("no pattern has a piece across the places where a document is cut for encoding") {
    std::vector<std::vector<std::string>> all_patterns;
    for (const Pattern pattern : {Pattern::gpt2, Pattern::cl100k, Pattern::cl100k_first})
        all_patterns.push_back({regex_of(pattern)});
    const SortedJson fixture = read_fixture("published.json");
    for (const auto& [name, parts] : fixture.at("tokenizers").items()) {
        const TemporaryDirectory folder;
        SortedJson file = read_fixture("trained.json");
        file["pre_tokenizer"] = parts.at("pre_tokenizer");
        write(folder / "tokenizer.json", file.dump());
        std::vector<std::string> patterns = Tokenizer::load(folder.path()).patterns();
        if (std::ranges::all_of(patterns, respects_encodable_cuts))
            all_patterns.push_back(std::move(patterns));
    }
    CHECK(all_patterns.size() == 3 + 7);
    for (const std::vector<std::string>& patterns : all_patterns) {
        CAPTURE(patterns);
        const Splitter splitter(patterns);
        Splitter::Scratch scratch;
        for (int round = 0; round < 20; ++round) {
            const std::string text = random_text(4000);
            const auto cut = [&](std::string_view all) {
                std::vector<std::string> pieces;
                splitter.split(all, scratch, [&](size_t at, size_t length) {
                    pieces.emplace_back(all.substr(at, length));
                });
                return pieces;
            };
            std::vector<std::string> parts;
            int cuts = 0;
            for (std::string_view rest = text; !rest.empty(); ++cuts) {
                const size_t length = encodable_piece(rest, static_cast<size_t>(random_int(0, 30)));
                REQUIRE(length > 0);
                for (auto& piece : cut(rest.substr(0, length))) parts.push_back(std::move(piece));
                rest.remove_prefix(length);
            }
            CHECK(cuts > 20);
            CHECK((parts == cut(text)));
        }
    }
    // A line break may join any white space beside it.
    for (const std::string space :
         {"\t",           "\v",           "\f",           "\r",           " ",
          "\xC2\x85",     "\xC2\xA0",     "\xE1\x9A\x80", "\xE2\x80\x80", "\xE2\x80\x81",
          "\xE2\x80\x82", "\xE2\x80\x83", "\xE2\x80\x84", "\xE2\x80\x85", "\xE2\x80\x86",
          "\xE2\x80\x87", "\xE2\x80\x88", "\xE2\x80\x89", "\xE2\x80\x8A", "\xE2\x80\xA8",
          "\xE2\x80\xA9", "\xE2\x80\xAF", "\xE2\x81\x9F", "\xE3\x80\x80"}) {
        CAPTURE(space);
        CHECK_FALSE(is_encodable_cut("a\n" + space + "b", 2));
        CHECK_FALSE(is_encodable_cut("a" + space + "\nb", 2 + space.size()));
    }
    CHECK(encodable_piece("no-line-break-here", 3) == 18);
    CHECK(encodable_piece("no line break here", 3) == 7);
    CHECK(encodable_piece("4 lines", 0) == 1);
    CHECK(encodable_piece(". , ! ? more", 0) == 12);
    CHECK(encodable_piece("a.\n(b)", 0) == 3);
    CHECK(encodable_piece("a.\n b.\n", 0) == 7);
    CHECK(encodable_piece("\xD0\xB6\r\n\r\n\xD0\xB6", 0) == 2);    // ж
    CHECK(encodable_piece("\xE4\xB8\xAD\n\xE4\xB8\xAD", 0) == 3);  // 中
    CHECK(encodable_piece("\xE3\x80\x80\n\xE4\xB8\xAD", 0) == 7);  // a space before the break
    CHECK(encodable_piece("\xE3\x80\x82 \xE4\xB8\xAD", 0) == 7);   // 。is punctuation
    CHECK(encodable_piece("\xB8\xAD \xE4\xB8", 0) == 5);           // no valid characters
}

TEST_CASE("a line <|endoftext|> ends a document and is not part of the text") {
    const TemporaryDirectory folder;
    const std::string filler = random_text(2000) + "z\n";
    struct Case {
        std::string text;
        std::vector<std::string> documents;
    };
    const std::string mark = "<|endoftext|>";
    const std::vector<Case> cases{
        {filler + mark + "\n" + "two\n" + mark + "\r\n" + "three", {filler, "two\n", "three"}},
        {mark + "\n" + mark + "\n" + filler + mark, {filler}},
        {filler + "in " + mark + " line\n" + mark + " \nend",
         {filler + "in " + mark + " line\n" + mark + " \nend"}},
        {filler + mark + "\r" + mark + "\nx", {filler + mark + "\r" + mark + "\nx"}},
    };
    for (const Case& one : cases) {
        const TemporaryDirectory out;
        write(folder / "t.txt", one.text);
        auto options = plain_options({folder / "t.txt"}, out.path());
        options.val_fraction = 0;
        prepare(options, nullptr);
        const Tokenizer tokenizer = Tokenizer::load(out / "tokenizer.json");
        auto documents =
            documents_of(tokenizer, tokens_of(out / "train_*.bin", tokenizer.vocab_size()));
        REQUIRE(!documents.empty());
        CHECK(documents.back().empty());
        documents.pop_back();
        CHECK(documents == one.documents);
    }
}

TEST_CASE("validation begins at a line, or between characters where lines are too long") {
    const TemporaryDirectory folder;
    const auto validation = [&](const std::vector<std::string>& texts, double fraction) {
        const TemporaryDirectory out;
        std::vector<std::string> paths;
        for (const std::string& text : texts) {
            paths.push_back(folder / concat("t", paths.size()));
            write(paths.back(), text);
        }
        auto options = plain_options(paths, out.path());
        options.train_vocab = 257;  // no merges: nothing becomes a single token
        options.val_fraction = fraction;
        prepare(options, nullptr);
        const Tokenizer tokenizer = Tokenizer::load(out / "tokenizer.json");
        const auto vocab_size = tokenizer.vocab_size();
        const std::string train =
            join(documents_of(tokenizer, tokens_of(out / "train_*.bin", vocab_size)));
        const std::string val =
            join(documents_of(tokenizer, tokens_of(out / "val_*.bin", vocab_size)));
        CHECK(train + val == join(texts));
        return val;
    };
    const std::string a(600, 'a'), b(40, 'b'), c(360, 'c');
    CHECK(validation({a + "\n" + b + "\n" + c}, 0.38) == c);  // the line after the split point
    CHECK(validation({a + "\n" + b + "\n" + c}, 0.35) == c);  // the line before it: none follows
    CHECK(validation({a + "\n" + c + c + "\n"}, 0.1).size() == 132);  // no line near: 10 % of 1322
    CHECK(validation({a, c}, 0.36) == c);                             // a file begins a line
    CHECK(validation({a, b + "\n" + c}, 0.401) == b + "\n" + c);
    for (const std::string character : {"\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80"}) {
        std::string text;
        while (text.size() < 1200) text += character;
        for (const int wanted : {120, 121, 122, 123, 600}) {  // begin at each of its bytes
            const std::string val = validation({text}, wanted / 1200.0);
            CAPTURE(character, wanted);
            CHECK(val.size() % character.size() == 0);
            CHECK(std::abs(static_cast<int>(val.size()) - wanted) <
                  static_cast<int>(character.size()));
        }
    }
}

TEST_CASE("a folder is prepared again in place, and files of others are not touched") {
    const TemporaryDirectory folder;
    const std::string out = folder / "data";
    write(folder / "a.txt", random_text(60000));
    write(folder / "b.txt", random_text(9000));
    prepare(plain_options({folder / "a.txt"}, out), nullptr);
    REQUIRE(fs::exists(out + "/train_000001.bin"));
    write(out + "/notes.txt", "mine");

    // Less data: the shards that are no longer needed are removed.
    auto options = plain_options({folder / "b.txt"}, out);
    options.shard_tokens = 100000;
    options.val_fraction = 0;
    prepare(options, nullptr);
    CHECK(names_in(out) ==
          std::vector<std::string>{"data.json", "notes.txt", "tokenizer.json", "train_000000.bin"});
    CHECK(read(out + "/notes.txt") == "mine");

    // With the folder's own tokenizer, which stays the same byte for byte.
    const std::string tokenizer_before = read(out + "/tokenizer.json");
    auto own = plain_options({folder / "a.txt"}, out);
    own.train_vocab = 0;
    own.tokenizer = out;
    prepare(own, nullptr);
    CHECK(read(out + "/tokenizer.json") == tokenizer_before);
    CHECK(read_data_manifest(out).complete);

    SECTION("a shard that data.json does not list is refused") {
        write(out + "/val_000077.bin", "foreign");
        const auto before = contents(out);
        const std::string message = error_of([&] { prepare(options, nullptr); });
        CHECK(contains(message, "val_000077.bin"));
        CHECK((contents(out) == before));
    }
    SECTION("shards without a data.json are refused") {
        fs::remove(out + "/data.json");
        CHECK(contains(error_of([&] { prepare(options, nullptr); }), "in the way"));
    }
    SECTION("a data.json of something else is refused") {
        for (const char* text : {"{}", "[1,2]", "no json", "{\"format\":\"other\"}", ""}) {
            write(out + "/data.json", text);
            const auto before = contents(out);
            CHECK(contains(error_of([&] { prepare(options, nullptr); }), "data.json"));
            CHECK((contents(out) == before));
        }
    }
    SECTION("a tokenizer.json of something else is refused") {
        const std::string other = folder / "other";
        fs::create_directory(other);
        write(other + "/tokenizer.json", "{}");
        options.out = other;
        CHECK(contains(error_of([&] { prepare(options, nullptr); }), "tokenizer.json"));
        CHECK(read(other + "/tokenizer.json") == "{}");
    }
    SECTION("what a killed process left is cleared and repaired") {
        fs::create_directory(out + "/.tokenize.tmp");
        write(out + "/.tokenize.tmp/train_000000.bin.tmp", "half");
        std::string manifest = read(out + "/data.json");
        const size_t at = manifest.find("\"complete\": true");
        REQUIRE(at != std::string::npos);
        manifest.replace(at, 16, "\"complete\": false");
        write(out + "/data.json", manifest);
        CHECK(!read_data_manifest(out).complete);
        fs::remove(out + "/train_000000.bin");
        prepare(options, nullptr);
        CHECK(read_data_manifest(out).complete);
        CHECK(names_in(out) == std::vector<std::string>{"data.json", "notes.txt", "tokenizer.json",
                                                        "train_000000.bin"});
    }
    SECTION("two processes do not write one folder") {
        const std::string file = out + "/.tokenize.lock";
        const int lock = ::open(file.c_str(), O_RDWR | O_CREAT, 0600);
        REQUIRE(::flock(lock, LOCK_EX | LOCK_NB) == 0);
        CHECK(contains(error_of([&] { prepare(options, nullptr); }), "another"));
        ::close(lock);
        // What others can open, they could lock.
        const int folder_lock = ::open(out.c_str(), O_RDONLY | O_DIRECTORY);
        REQUIRE(::flock(folder_lock, LOCK_EX | LOCK_NB) == 0);
        CHECK_NOTHROW(prepare(options, nullptr));
        ::close(folder_lock);
        CHECK_FALSE(fs::exists(file));
    }
}

TEST_CASE("a full disk leaves the folder as it was") {
    const TemporaryDirectory folder;
    const std::string out = folder / "data";
    write(folder / "a.txt", random_text(9000));
    write(folder / "large.txt", random_text(900000));
    prepare(plain_options({folder / "a.txt"}, out), nullptr);
    const auto before = contents(out);
    auto options = plain_options({folder / "large.txt"}, out);
    options.shard_tokens = 1 << 30;

    // A limit on the file size makes writes fail as on a full disk.
    rlimit limit{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &limit) == 0);
    const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{100000, limit.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    std::string message;
    try {
        prepare(options, nullptr);
    } catch (const Error& error) {
        message = error.what();
    }
    ::setrlimit(RLIMIT_FSIZE, &limit);
    std::signal(SIGXFSZ, old_handler);
    CHECK(contains(message, "train_000000.bin"));
    // What is kept for resuming is hidden.
    CHECK(fs::exists(out + "/.tokenize.tmp/tokenizer.json"));
    fs::rename(out + "/.tokenize.tmp", folder / "kept");
    CHECK((contents(out) == before));
    fs::rename(folder / "kept", out + "/.tokenize.tmp");

    options.save_seconds = 0;
    prepare(options, nullptr);
    options.out = folder / "whole";
    prepare(options, nullptr);
    CHECK((contents(out) == contents(folder / "whole")));
}

TEST_CASE("bad input to prepare is one sentence and makes no folder of shards") {
    const TemporaryDirectory folder;
    const std::string out = folder / "out";
    write(folder / "good.txt", random_text(5000));
    write(folder / "empty.txt", "");
    write(folder / "tiny.txt", "ab");
    write(folder / "separators.txt", "<|endoftext|>\n<|endoftext|>\n<|endoftext|>\n");
    const auto refused = [&](auto change) {
        auto options = plain_options({folder / "good.txt"}, out);
        change(options);
        const std::string message = error_of([&] { prepare(options, nullptr); });
        CHECK(!fs::exists(out + "/data.json"));
        CHECK(!fs::exists(out + "/.tokenize.tmp"));
        CHECK(message.find('\n') == std::string::npos);
        return message;
    };
    using Options = PrepareOptions&;
    for (const auto& [name, beginning, advice] :
         {std::tuple{"zipped.txt", "\x1f\x8b\x08", "ends in .gz"},
          {"packed.txt", "\x28\xb5\x2f\xfd", "ends in .zst"},
          {"wide.txt", "\xff\xfeG\0o\0", "iconv"}}) {
        write(folder / name, beginning + random_text(5000));
        const std::string message =
            refused([&, name = name](Options o) { o.texts = {folder / name}; });
        CHECK(contains(message, name));
        CHECK(contains(message, advice));
    }
    prepare(plain_options({folder / "good.txt"}, folder / "shards"), nullptr);
    CHECK(contains(refused([&](Options o) { o.texts = {folder / "shards/train_000000.bin"}; }),
                   "is already a token shard"));
    CHECK(contains(refused([&](Options o) { o.texts = {folder / "empty.txt"}; }), "is empty"));
    CHECK(contains(refused([&](Options o) { o.texts = {folder / "none.txt"}; }), "none.txt"));
    CHECK(contains(refused([&](Options o) { o.texts = {folder / "tiny.txt"}; }), "is left for"));
    CHECK(contains(refused([&](Options o) { o.texts = {folder / "separators.txt"}; }), "is empty"));
    CHECK(contains(refused([&](Options o) { o.texts.clear(); }), "no text"));
    CHECK(contains(refused([&](Options o) { o.out.clear(); }), "--out"));
    CHECK(contains(refused([&](Options o) { o.out = folder / "good.txt"; }), "good.txt"));
    CHECK(contains(refused([&](Options o) { o.out = "/dev/full"; }), "/dev/full"));
    CHECK(contains(refused([&](Options o) { o.tokenizer = folder.path(); }), "either"));
    CHECK(contains(refused([&](Options o) { o.train_vocab = 0; }), "either"));
    CHECK(contains(refused([&](Options o) { o.train_vocab = 0, o.tokenizer = folder / "none"; }),
                   "none"));
    for (const double fraction : {-0.1, 0.51, std::numeric_limits<double>::quiet_NaN()})
        CHECK(
            contains(refused([&](Options o) { o.val_fraction = fraction; }), "between 0 and 0.5"));
    CHECK(contains(refused([&](Options o) { o.shard_tokens = 1; }), "--shard-tokens"));
}
