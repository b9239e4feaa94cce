#include "tokenizer/formats.h"

#include <set>

#include "base/error.h"
#include "test/catch.h"
#include "test/text.h"
#include "test/tokenizer/reference.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/tokenizer.h"

namespace train_gpt {

namespace {

using nlohmann::json;
using Ids = std::vector<uint32_t>;

/// The message of the Error that loading `path` throws; empty when it loads. Any other exception
/// fails the test.
std::string load_error(const std::string& path) {
    try {
        Tokenizer::load(path);
        return "";
    } catch (const Error& error) {
        return error.what();
    }
}

std::string load_error(const json& tokenizer) {
    const TemporaryDirectory folder;
    write_file(folder / "tokenizer.json", tokenizer.dump());
    return load_error(folder / "tokenizer.json");
}

Tokenizer load_json(const json& tokenizer) {
    const TemporaryDirectory folder;
    write_file(folder / "tokenizer.json", tokenizer.dump());
    return Tokenizer::load(folder.path());
}

json trained() { return read_fixture("trained.json"); }

json added_token(uint32_t id, const std::string& text) {
    return {{"id", id},        {"content", text},     {"single_word", false}, {"lstrip", false},
            {"rstrip", false}, {"normalized", false}, {"special", true}};
}

}  // namespace

TEST_CASE("the byte alphabet writes each byte as one character and reads it back") {
    std::set<std::string> seen;
    std::string all;
    for (int i = 0; i < 256; ++i) {
        const std::string byte(1, static_cast<char>(byte_at(i)));
        CHECK(seen.insert(to_byte_alphabet(byte)).second);
        if (i > 0)
            CHECK(to_byte_alphabet(std::string(1, static_cast<char>(byte_at(i - 1)))) <
                  to_byte_alphabet(byte));
        all += byte;
    }
    CHECK(from_byte_alphabet(to_byte_alphabet(all)) == all);
    CHECK(to_byte_alphabet(" the\n") == "Ġthe\u010A");
    for (const char* bad : {" ", "\u00AD", "\u0144", "世", "\xC4"})
        CHECK_FALSE(from_byte_alphabet(bad).has_value());
}

TEST_CASE("GPT-2's pair of files is read under both their names") {
    const json model = trained().at("model");
    std::string merges = "#version: 0.2\n";
    for (const auto& pair : model.at("merges"))
        merges += pair[0].get<std::string>() + " " + pair[1].get<std::string>() + "\n";
    json vocab = model.at("vocab");
    vocab["<|endoftext|>"] = 699;

    const auto vectors = read_fixture("trained_ids.json");
    const bool windows_line_ends = random_int(0, 1) == 1;
    if (windows_line_ends) {
        std::string with_returns;
        for (const char c : merges)
            with_returns += c == '\n' ? std::string("\r\n") : std::string(1, c);
        merges = with_returns;
    }
    for (const auto& [vocab_name, merges_name] :
         {std::pair("vocab.json", "merges.txt"), std::pair("encoder.json", "vocab.bpe")}) {
        const TemporaryDirectory folder;
        write_file(folder / vocab_name, vocab.dump());
        CHECK(contains(load_error(folder.path()), "merges.txt"));
        write_file(folder / merges_name, merges);
        const Tokenizer tokenizer = Tokenizer::load(folder.path());
        CHECK(tokenizer.end_of_text() == 699u);
        for (const char* name : {vocab_name, merges_name})  // either of them selects both
            CHECK(Tokenizer::load(folder / name).to_json() == tokenizer.to_json());
        for (size_t i = 0; i < vectors.at("strings").size(); ++i) {
            const std::string text = vectors.at("strings")[i];
            CHECK(tokenizer.encode(text) == vectors.at("ordinary")[i].get<Ids>());
            CHECK(tokenizer.encode_with_special(text) == vectors.at("with_special")[i].get<Ids>());
        }
    }
}

TEST_CASE("only a line with the version is a comment among merges") {
    json vocab = json::object();
    for (int i = 0; i < 256; ++i)
        vocab[to_byte_alphabet(std::string(1, static_cast<char>(byte_at(i))))] = i;
    const int hash = vocab.at("#"), a = vocab.at("a");
    vocab["##"] = 256;
    vocab["##a"] = 257;
    vocab["a#"] = 258;
    for (const char* head : {"", "#version: 0.2\n"}) {
        const TemporaryDirectory folder;
        write_file(folder / "vocab.json", vocab.dump());
        write_file(folder / "merges.txt", std::string(head) + "# #\n## a\n\na #\n");
        const Tokenizer tokenizer = Tokenizer::load(folder.path());
        CHECK(tokenizer.encode("##") == Ids{256});
        // GPT-2's pattern keeps punctuation and letters apart.
        CHECK(tokenizer.encode("###a#") == Ids{256, static_cast<uint32_t>(hash),
                                               static_cast<uint32_t>(a),
                                               static_cast<uint32_t>(hash)});
        json as_json = json::parse(tokenizer.to_json());
        CHECK(as_json.at("model").at("merges") == json({"# #", "## a", "a #"}));
        CHECK(load_json(as_json).encode("##") == Ids{256});
    }
}

TEST_CASE("members that tokenizer.json lacks have the values of a new token or step") {
    json file = trained();
    file["normalizer"] = {{"type", "NFC"}};
    file["pre_tokenizer"] = {{"type", "ByteLevel"}};
    file["added_tokens"].push_back({{"id", 700}, {"content", "\u00e9!"}});
    file["added_tokens"].push_back({{"id", 701}, {"content", "e\u0301?"}, {"special", true}});
    const Tokenizer tokenizer = load_json(file);
    CHECK_FALSE(tokenizer.is_special(700));
    // A token that is not special is looked for in normalised text, a special one before.
    CHECK(tokenizer.encode("e\u0301!") == Ids{700});
    CHECK(tokenizer.encode_with_special("e\u0301?") == Ids{701});
    CHECK(tokenizer.encode_with_special("\u00e9?") != Ids{701});
    CHECK(tokenizer.patterns() == std::vector{regex_of(Pattern::gpt2)});
    CHECK(tokenizer.encode("a") == tokenizer.encode(" a"));  // add_prefix_space
    const json written = json::parse(tokenizer.to_json());
    for (const json& token : written.at("added_tokens"))
        CHECK(token.at("normalized") == (token.at("id") == 700));
    CHECK(load_json(written).to_json() == tokenizer.to_json());
}

TEST_CASE("merges are read as pairs and as strings") {
    json as_strings = trained();
    for (auto& merge : as_strings["model"]["merges"])
        merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
    CHECK(load_json(as_strings).to_json() == load_json(trained()).to_json());
}

TEST_CASE("add_prefix_space puts a space before a text that has none") {
    json prefixed = trained();
    prefixed["pre_tokenizer"]["add_prefix_space"] = true;
    const Tokenizer with = load_json(prefixed), without = load_json(trained());
    CHECK(with.encode("word and") == without.encode(" word and"));
    CHECK(with.encode(" word and") == without.encode(" word and"));
    CHECK(with.encode("\nword") == without.encode(" \nword"));
    CHECK(with.encode("").empty());
    Ids expected = without.encode(" a");
    expected.push_back(with.end_of_text().value());
    for (const uint32_t id : without.encode(" b")) expected.push_back(id);
    CHECK(with.encode_with_special("a<|endoftext|>b") == expected);
    CHECK(load_json(json::parse(with.to_json())).encode("word") == with.encode("word"));
}

TEST_CASE("ignore_merges takes a whole piece that is a token") {
    json model = trained();
    model["model"]["vocab"]["qqq"] = 698 + 2;  // no merge produces it
    const Ids merged = load_json(model).encode("qqq");
    CHECK(merged.size() == 3);
    model["model"]["ignore_merges"] = true;
    CHECK(load_json(model).encode("qqq") == Ids{700});
    CHECK(load_json(json::parse(load_json(model).to_json())).encode("qqq") == Ids{700});
}

TEST_CASE(
    "added tokens: the leftmost, then the longest; those that are not special are always "
    "recognised") {
    json file = trained();
    file["added_tokens"].push_back(added_token(700, "<a>"));
    file["added_tokens"].push_back(added_token(701, "<a><b>"));
    file["added_tokens"].push_back(added_token(705, "two words"));
    file["added_tokens"][3]["special"] = false;
    const Tokenizer tokenizer = load_json(file);
    CHECK(tokenizer.vocab_size() == 706);
    CHECK(tokenizer.token_bytes(703).empty());
    CHECK(tokenizer.encode_with_special("<a><b><a>two words") == Ids{701, 700, 705});
    const Ids plain = tokenizer.encode("<a><b>two words");
    CHECK(std::count(plain.begin(), plain.end(), 705u) == 1);
    CHECK(std::count(plain.begin(), plain.end(), 701u) == 0);
    file["added_tokens"].push_back(added_token(702, "><b"));
    file["added_tokens"].back()["special"] = false;
    // A special token is plain text here, but no other token is recognised inside it either.
    CHECK(load_json(file).encode("<a><b>") == load_json(trained()).encode("<a><b>"));
    CHECK(tokenizer.is_special(701));
    CHECK_FALSE(tokenizer.is_special(705));
    CHECK(tokenizer.decode(Ids{701, 700, 705}) == "<a><b><a>two words");
    CHECK(load_json(json::parse(tokenizer.to_json())).to_json() == tokenizer.to_json());
}

TEST_CASE("a Split by a known pattern before ByteLevel is read, also in its inverted spelling") {
    json file = trained();
    const json byte_level = {
        {"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
    json split = {{"type", "Split"},
                  {"pattern",
                   {{"Regex", R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
                              R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}}},
                  {"behavior", "Isolated"},
                  {"invert", false}};
    file["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}};
    CHECK(load_json(file).patterns() == std::vector{regex_of(Pattern::cl100k_first)});
    split["behavior"] = "Removed";
    split["invert"] = true;
    file["pre_tokenizer"]["pretokenizers"] = {split, byte_level};
    CHECK(load_json(file).patterns() == std::vector{regex_of(Pattern::cl100k_first)});
    split["behavior"] = "MergedWithNext";
    file["pre_tokenizer"]["pretokenizers"] = {split, byte_level};
    CHECK(contains(load_error(file), "MergedWithNext"));
    split["behavior"] = "Isolated";
    split["pattern"]["Regex"] = "[a-z]+";
    file["pre_tokenizer"]["pretokenizers"] = {split, byte_level};
    CHECK(load_json(file).patterns() == std::vector<std::string>{"[a-z]+"});
}

TEST_CASE("what is not supported or contradicts itself is refused by name") {
    const auto refused = [](const std::function<void(json&)>& change, const std::string& named) {
        json file = trained();
        change(file);
        const std::string error = load_error(file);
        CAPTURE(named, error);
        CHECK(contains(error, named));
        CHECK(contains(error, "tokenizer.json"));
    };
    refused([](json& f) { f["model"]["type"] = "WordPiece"; }, "WordPiece");
    refused([](json& f) { f["model"]["dropout"] = 0.1; }, "dropout");
    refused([](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }, "end_of_word_suffix");
    refused([](json& f) { f["model"]["continuing_subword_prefix"] = "##"; },
            "continuing_subword_prefix");
    refused([](json& f) { f["normalizer"] = {{"type", "NFKC"}}; }, "NFKC");
    refused([](json& f) { f["decoder"] = {{"type", "Metaspace"}}; }, "Metaspace");
    refused([](json& f) { f["pre_tokenizer"] = {{"type", "Whitespace"}}; }, "Whitespace");
    refused([](json& f) { f["pre_tokenizer"] = nullptr; }, "pre_tokenizer");
    refused([](json& f) { f["pre_tokenizer"]["use_regex"] = false; }, "pattern");
    refused([](json& f) { f["added_tokens"][0]["lstrip"] = true; }, "lstrip");
    refused([](json& f) { f["added_tokens"][0]["id"] = 3; }, "<|endoftext|>");
    refused([](json& f) { f["added_tokens"][0]["id"] = -1; }, "<|endoftext|>");
    refused([](json& f) { f["added_tokens"].push_back(f["added_tokens"][0]); }, "<|endoftext|>");
    refused([](json& f) { f["model"]["vocab"]["\u4e16"] = 900; }, "\u4e16");
    refused([](json& f) { f["model"]["vocab"]["xyz"] = 5; }, "id 5");
    refused([](json& f) { f["model"]["vocab"]["xyz"] = 4294967295u; }, "xyz");
    refused([](json& f) { f["model"]["vocab"]["xyz"] = 1.5; }, "xyz");
    refused([](json& f) { f["model"]["vocab"].erase("a"); }, "byte 97");
    refused([](json& f) { f["model"]["vocab"] = json::array(); }, "vocab");
    refused([](json& f) { f["model"]["merges"][7] = "nospace"; }, "merge 8");
    refused([](json& f) { f["model"]["merges"][7] = "a b c"; }, "merge 8");
    refused([](json& f) { f["model"]["merges"][7] = {"zzzz", "a"}; }, "zzzz");
    refused([](json& f) { f["model"]["merges"].push_back(f["model"]["merges"][0]); },
            "repeats merge 1");
    refused([](json& f) { f.erase("model"); }, "model");
    refused([](json& f) { f = json::array(); }, "object");
    refused([](json& f) { f["model"]["ignore_merges"] = "yes"; }, "ignore_merges");
}

TEST_CASE("a damaged rank file is refused with the line") {
    const MappedFile good(fixture_path("cl100k_odd.tiktoken"));
    const auto error_of = [](const std::string& name, const std::string& text) {
        const TemporaryDirectory folder;
        write_file(folder / name, text);
        return load_error(folder / name);
    };
    const std::string text(good.text());
    CHECK(error_of("cl100k_x.tiktoken", text).empty());
    CHECK(contains(error_of("mystery.tiktoken", text), "cl100k"));
    CHECK(contains(error_of("cl100k_x.tiktoken", ""), "empty"));
    CHECK(contains(error_of("cl100k_x.tiktoken", text + "YWFhYQ==\n"), "line 701"));
    CHECK(contains(error_of("cl100k_x.tiktoken", text + "YWFh!Q== 900\n"), "base64"));
    CHECK(contains(error_of("cl100k_x.tiktoken", text + "YWFhYQ== 12x\n"), "line 701"));
    CHECK(contains(error_of("cl100k_x.tiktoken", text + "YWFhYWFhYWFhYWE= 12\n"), "second time"));
    CHECK(contains(error_of("cl100k_x.tiktoken", text + "YQ== 900\n"), "same bytes"));
    CHECK(contains(error_of("cl100k_x.tiktoken", "YQ== 0\n"), "single byte"));
}

TEST_CASE("bytes after the end of a tokenizer.json are refused with their place") {
    const TemporaryDirectory folder;
    const std::vector<std::string_view> texts{"some text"};
    Tokenizer::train(texts, 260).save(folder / "tokenizer.json");
    const std::string good = read(folder / "tokenizer.json");
    for (const std::string& after :
         {std::string("x"), std::string("{}"), good, std::string(1, '\0'),
          std::string("\0\0more", 6), std::string(" \n\0", 3)}) {
        write(folder / "tokenizer.json", good + after);
        CHECK(contains(load_error(folder / "tokenizer.json"), "not valid JSON"));
        CHECK(contains(load_error(folder / "tokenizer.json"),
                       after.find('\0') == after.npos ? " at byte " : ", column "));
    }
    write(folder / "tokenizer.json", good + " \r\n");
    CHECK(load_error(folder / "tokenizer.json").empty());
}

TEST_CASE("a path without a tokenizer is refused with the names of valid files") {
    const TemporaryDirectory folder;
    CHECK(contains(load_error(folder.path()), "tokenizer.json"));
    CHECK(contains(load_error(folder / "missing.json"), "missing.json"));
    write_file(folder / "empty.json", "");
    CHECK(contains(load_error(folder / "empty.json"), "not valid JSON"));
    // A file that is far too large is not read; this one takes no space on the disk.
    std::filesystem::resize_file(folder / "empty.json", max_vocabulary_bytes + 1);
    CHECK(contains(load_error(folder / "empty.json"),
                   "empty.json has 256 MiB and is not a vocabulary"));
    write_file(folder / "a.tiktoken", "");
    write_file(folder / "b.tiktoken", "");
    CHECK(contains(load_error(folder.path()), "several"));
}

TEST_CASE("a damaged file causes an error and nothing worse") {
    const std::string names[] = {"trained.json", "cl100k_odd.tiktoken"};
    const TemporaryDirectory folder;
    for (const std::string& name : names) {
        const MappedFile good(fixture_path(name));
        for (int round = 0; round < 60; ++round) {
            std::string text(good.text());
            const auto somewhere = [&] {
                return static_cast<size_t>(random_int(0, static_cast<int64_t>(text.size()) - 1));
            };
            if (random_int(0, 3) == 0) text.resize(somewhere());
            for (int64_t i = random_int(1, 4); i > 0 && !text.empty(); --i)
                text[somewhere()] =
                    static_cast<char>(random_int(0, 1) ? random_int(0, 255) : random_int('0', 'z'));
            write_file(folder / name, text);
            const std::string error = load_error(folder / name);
            if (!error.empty()) CHECK(contains(error, name));
        }
    }
}

}  // namespace train_gpt
