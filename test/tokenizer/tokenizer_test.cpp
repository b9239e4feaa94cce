#include "tokenizer/tokenizer.h"

#include <cstdlib>
#include <thread>

#include "kernels/error.h"
#include "test/catch.h"
#include "test/tokenizer/reference.h"

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
    CHECK(tokenizer.pattern() == Pattern::cl100k);
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
        CHECK(loaded.pattern() == pattern);
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

TEST_CASE("a word of a million letters is encoded like any other") {
    // With work that grows with the square of the length this would not end.
    const Tokenizer tokenizer = train_on_corpus(600, Pattern::gpt2);
    for (const std::string& text :
         {std::string(1000000, 'a'), random_letters(1000000, 26), std::string(1000000, ' ')})
        CHECK(tokenizer.decode(tokenizer.encode(text)) == text);
}

TEST_CASE("an id beyond the vocabulary is an error") {
    const Tokenizer tokenizer = train_on_corpus(300, Pattern::gpt2);
    const Ids ids{5, tokenizer.vocab_size()};
    CHECK_THROWS_AS(tokenizer.decode(ids), Error);
    CHECK_THROWS_AS(tokenizer.token_bytes(tokenizer.vocab_size()), Error);
    CHECK_FALSE(tokenizer.is_special(tokenizer.vocab_size()));
}

}  // namespace train_gpt
