#include "tokenizer/tokenizer.h"

#include <cstdlib>
#include <map>
#include <optional>
#include <thread>

#include "base/error.h"
#include "test/catch.h"
#include "test/tokenizer/reference.h"
#include "tokenizer/bpe.h"
#include "tokenizer/bpe_train.h"
#include "tokenizer/piece_cache.h"

namespace train_gpt {

namespace {

using Ids = std::vector<uint32_t>;

Tokenizer train_on_corpus(uint32_t vocab_size, Pattern pattern) {
    const std::vector<std::string> documents = read_fixture("corpus.json");
    return Tokenizer::train(std::vector<std::string_view>(documents.begin(), documents.end()),
                            vocab_size, {pattern, 1});
}

void check_ids(const Tokenizer& tokenizer, const nlohmann::json& strings,
               const nlohmann::json& expected, bool with_special = false) {
    REQUIRE(strings.size() == expected.size());
    for (size_t i = 0; i < strings.size(); ++i) {
        const std::string text = strings[i];
        CAPTURE(i, text);
        const Ids ids = with_special ? tokenizer.encode_with_special(text) : tokenizer.encode(text);
        CHECK(ids == expected[i].get<Ids>());
        CHECK(tokenizer.decode(ids) == text);
    }
}

}  // namespace

TEST_CASE("GPT-2's vocabulary encodes as the reference does") {
    const char* folder = std::getenv("GPT2_VOCAB_DIR");
    if (!folder || !*folder) {
        WARN(
            "not checked: set GPT2_VOCAB_DIR to a folder with OpenAI's encoder.json and vocab.bpe");
        return;
    }
    const Tokenizer gpt2 = Tokenizer::load(folder);
    CHECK(gpt2.vocab_size() == 50257);
    CHECK(gpt2.end_of_text() == 50256u);
    CHECK(gpt2.encode("Hello world") == Ids{15496, 995});
    CHECK(gpt2.encode_with_special("Hi<|endoftext|>") == Ids{17250, 50256});
    const auto vectors = read_fixture("gpt2.json");
    check_ids(gpt2, vectors.at("strings"), vectors.at("ids"));

    const TemporaryDirectory out;
    gpt2.save(out / "tokenizer.json");
    check_ids(Tokenizer::load(out.path()), vectors.at("strings"), vectors.at("ids"));
}

TEST_CASE("a tokenizer.json written by Hugging Face encodes as it does there") {
    const Tokenizer tokenizer = Tokenizer::load(fixture_path("trained.json"));
    const auto vectors = read_fixture("trained_ids.json");
    check_ids(tokenizer, vectors.at("strings"), vectors.at("ordinary"));
    check_ids(tokenizer, vectors.at("strings"), vectors.at("with_special"), true);
}

TEST_CASE("a rank file encodes as tiktoken does, and so does the tokenizer.json made from it") {
    const Tokenizer tokenizer = Tokenizer::load(fixture_path("cl100k_odd.tiktoken"));
    const auto vectors = read_fixture("odd_ids.json");
    CHECK(tokenizer.patterns() == std::vector{regex_of(Pattern::cl100k)});
    CHECK(tokenizer.end_of_text() == 700u);
    check_ids(tokenizer, vectors.at("strings"), vectors.at("ids"));
    const TemporaryDirectory out;
    tokenizer.save(out / "tokenizer.json");
    check_ids(Tokenizer::load(out.path()), vectors.at("strings"), vectors.at("ids"));
}

TEST_CASE("any bytes come back from their tokens") {
    for (const Pattern pattern : {Pattern::gpt2, Pattern::cl100k, Pattern::cl100k_first}) {
        const Tokenizer tokenizer = train_on_corpus(600, pattern);
        CHECK(tokenizer.encode("").empty());
        CHECK(tokenizer.decode({}).empty());
        for (int round = 0; round < 100; ++round) {
            const std::string text = random_bytes(static_cast<size_t>(random_int(0, 400)));
            REQUIRE(tokenizer.decode(tokenizer.encode(text)) == text);
            REQUIRE(tokenizer.decode(tokenizer.encode_with_special(text)) == text);
        }
        std::string all;
        for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
        REQUIRE(tokenizer.decode(tokenizer.encode(all)) == all);
    }
}

TEST_CASE("a saved tokenizer is the same when loaded") {
    for (const Pattern pattern : {Pattern::gpt2, Pattern::cl100k, Pattern::cl100k_first}) {
        const Tokenizer tokenizer = train_on_corpus(600, pattern);
        const TemporaryDirectory out;
        tokenizer.save(out / "tokenizer.json");
        const Tokenizer loaded = Tokenizer::load(out / "tokenizer.json");
        CHECK(loaded.patterns() == std::vector{regex_of(pattern)});
        CHECK(loaded.vocab_size() == tokenizer.vocab_size());
        CHECK(loaded.end_of_text() == tokenizer.end_of_text());
        CHECK(loaded.to_json() == tokenizer.to_json());
        for (uint32_t id = 0; id < tokenizer.vocab_size(); ++id) {
            CHECK(loaded.token_bytes(id) == tokenizer.token_bytes(id));
            CHECK(loaded.is_special(id) == tokenizer.is_special(id));
        }
        const std::string text = random_bytes(2000);
        CHECK(loaded.encode(text) == tokenizer.encode(text));
    }
}

TEST_CASE("special tokens are text for encode and ids for encode_with_special") {
    const Tokenizer tokenizer = train_on_corpus(400, Pattern::gpt2);
    const uint32_t end = tokenizer.end_of_text().value();
    CHECK(end + 1 == tokenizer.vocab_size());
    const std::string text = "one<|endoftext|><|endoftext|> two<|endoftext|";
    const Ids plain = tokenizer.encode(text), special = tokenizer.encode_with_special(text);
    CHECK(std::count(plain.begin(), plain.end(), end) == 0);
    CHECK(std::count(special.begin(), special.end(), end) == 2);
    CHECK(tokenizer.decode(plain) == text);
    CHECK(tokenizer.decode(special) == text);
    Ids expected = tokenizer.encode("one");
    expected.insert(expected.end(), {end, end});
    for (const uint32_t id : tokenizer.encode(" two<|endoftext|")) expected.push_back(id);
    CHECK(special == expected);
}

TEST_CASE("one tokenizer serves many threads") {
    const Tokenizer tokenizer = train_on_corpus(600, Pattern::gpt2);
    const std::string text = random_bytes(20000);
    const Ids expected = tokenizer.encode(text);
    std::vector<Ids> results(4);
    std::vector<std::thread> threads;
    for (Ids& result : results)
        threads.emplace_back([&tokenizer, &text, &result] { result = tokenizer.encode(text); });
    for (std::thread& thread : threads) thread.join();
    for (const Ids& result : results) CHECK(result == expected);
}

TEST_CASE(
    "300,000 equal characters, or a word of as many letters, are encoded like any other text") {
    // With work quadratic in the length, this would not end.
    std::string noise;
    for (int i = 0; i < 300000; ++i) noise += static_cast<char>(random_int(0, 255));
    const auto repeated = [](std::string_view what) {
        std::string text;
        while (text.size() < 300000) text += what;
        return text;
    };
    for (const Pattern pattern : {Pattern::gpt2, Pattern::cl100k, Pattern::cl100k_first}) {
        const Tokenizer tokenizer = train_on_corpus(600, pattern);
        for (const std::string& text :
             {repeated("a"), repeated(" "), repeated("\n"), repeated("\n "), repeated("7"),
              repeated("'"), repeated("\u00e9"), repeated("\U0001f44d"), repeated("<|endoftext|"),
              random_letters(300000, 26), noise})
            CHECK(tokenizer.decode(tokenizer.encode(text)) == text);
    }
}

TEST_CASE("an encoder gives the tokens of merging each piece, whatever it has seen before") {
    for (const Pattern pattern : {Pattern::gpt2, Pattern::cl100k, Pattern::cl100k_first}) {
        const std::vector<std::string> documents = read_fixture("corpus.json");
        WordCounts counts(pattern);
        for (const std::string& document : documents) counts.add(document);
        const LearntMerges learnt = learn_merges(counts, 599, 1);
        const Tokenizer tokenizer = Tokenizer::train(counts, 600);
        const BytePairEncoder merges(learnt.tokens, learnt.merges, false);
        PieceMerger merger;
        const auto simply = [&](std::string_view text) {
            Ids ids;
            for (const std::string_view piece : pieces_of(pattern, text)) {
                const auto merged = merges.merge_bytes(piece, merger);
                ids.insert(ids.end(), merged.begin(), merged.end());
            }
            return ids;
        };
        std::optional<Tokenizer> gone = tokenizer;
        Encoder encoder(*gone);
        gone.reset();
        Ids all, expected;
        for (int round = 0; round < 300; ++round) {
            // More distinct words than the cache starts with, some of them again and again.
            std::string text = random_bytes(static_cast<size_t>(random_int(0, 300)));
            for (int64_t word = random_int(0, 60); word > 0; --word)
                text += ' ' + random_letters(static_cast<size_t>(random_int(1, 20)),
                                             random_int(0, 1) ? 2 : 26);
            const Ids simple = simply(text);
            REQUIRE(tokenizer.encode(text) == simple);
            encoder.encode(text, all);
            expected.insert(expected.end(), simple.begin(), simple.end());
            REQUIRE(all == expected);
        }
    }
}

TEST_CASE("a cache of pieces never gives the tokens of another piece") {
    PieceCache cache;
    std::map<std::string, Ids> inserted;
    size_t found = 0;
    for (int round = 0; round < 60000; ++round) {
        const size_t length = static_cast<size_t>(random_int(1, PieceKey::longest));
        const std::string piece = random_letters(length, random_int(0, 1) ? 2 : 26) +
                                  std::string(static_cast<size_t>(random_int(0, 20)), 'x');
        const PieceKey key = PieceKey::of(piece, 0, length);
        const auto known = cache.find(key);
        const std::string text = piece.substr(0, length);
        if (!known.empty()) {
            REQUIRE(Ids(known.begin(), known.end()) == inserted.at(text));
            ++found;
            continue;
        }
        Ids ids(static_cast<size_t>(random_int(1, 15)));
        for (uint32_t& id : ids) id = static_cast<uint32_t>(random_int(0, 1000));
        cache.insert(key, ids);
        inserted[text] = ids;
    }
    CHECK(found > 1000);
}

TEST_CASE("an id beyond the vocabulary is an error") {
    const Tokenizer tokenizer = train_on_corpus(300, Pattern::gpt2);
    const Ids ids{5, tokenizer.vocab_size()};
    CHECK_THROWS_AS(tokenizer.decode(ids), Error);
    CHECK_THROWS_AS(tokenizer.token_bytes(tokenizer.vocab_size()), Error);
    CHECK_FALSE(tokenizer.is_special(tokenizer.vocab_size()));
}

}  // namespace train_gpt
