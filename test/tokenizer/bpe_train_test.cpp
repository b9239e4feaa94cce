#include "tokenizer/bpe_train.h"

#include <map>

#include "base/error.h"
#include "test/catch.h"
#include "test/text.h"
#include "test/tokenizer/reference.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/tokenizer.h"

namespace train_gpt {

namespace {

std::vector<std::string_view> views(const std::vector<std::string>& texts) {
    return {texts.begin(), texts.end()};
}

/// Training as defined: all pairs of all pieces are counted again before each merge.
std::vector<Merge> naive_training(const std::vector<std::string>& texts, Pattern pattern,
                                  uint32_t vocab_size, int64_t min_frequency) {
    std::vector<uint32_t> byte_ids(256);
    for (int i = 0; i < 256; ++i) byte_ids[byte_at(i)] = static_cast<uint32_t>(i);
    std::vector<std::vector<uint32_t>> words;
    for (const std::string& text : texts) {
        for (const std::string_view piece : pieces_of(pattern, text)) {
            words.emplace_back();
            for (const char byte : piece)
                words.back().push_back(byte_ids[static_cast<uint8_t>(byte)]);
        }
    }
    std::vector<Merge> merges;
    for (uint32_t id = 256; id < vocab_size; ++id) {
        std::map<std::pair<uint32_t, uint32_t>, int64_t> counts;
        for (const auto& word : words)
            for (size_t i = 0; i + 1 < word.size(); ++i) ++counts[{word[i], word[i + 1]}];
        auto best =
            counts.begin();  // of equal counts the first in the map's order, the smaller pair
        for (auto entry = counts.begin(); entry != counts.end(); ++entry)
            if (entry->second > best->second) best = entry;
        if (best == counts.end() || best->second < min_frequency) break;
        const Merge merge{best->first.first, best->first.second, id};
        merges.push_back(merge);
        for (auto& word : words) {
            std::vector<uint32_t> merged;
            for (size_t i = 0; i < word.size(); ++i) {
                const bool here =
                    i + 1 < word.size() && word[i] == merge.left && word[i + 1] == merge.right;
                merged.push_back(here ? id : word[i]);
                if (here) ++i;
            }
            word = merged;
        }
    }
    return merges;
}

}  // namespace

TEST_CASE("training finds the merges that Hugging Face's trainer finds") {
    const std::vector<std::string> documents = read_fixture("corpus.json");
    const auto expected = read_fixture("trained.json");
    const Tokenizer trained = Tokenizer::train(views(documents), 700);
    const auto ours = nlohmann::json::parse(trained.to_json());
    CHECK(ours.at("model").at("vocab") == [&] {
        auto vocab = expected.at("model").at("vocab");
        vocab["<|endoftext|>"] = 699;
        return vocab;
    }());
    std::vector<std::string> merges;
    for (const auto& pair : expected.at("model").at("merges"))
        merges.push_back(pair[0].get<std::string>() + " " + pair[1].get<std::string>());
    CHECK(ours.at("model").at("merges") == merges);
}

TEST_CASE("incremental training equals counting again before each merge") {
    for (int round = 0; round < 40; ++round) {
        std::vector<std::string> texts;
        for (int64_t i = random_int(1, 10); i > 0; --i)
            texts.push_back(random_int(0, 1)
                                ? random_bytes(static_cast<size_t>(random_int(0, 200)))
                                : random_letters(static_cast<size_t>(random_int(0, 60)),
                                                 static_cast<int>(random_int(1, 3))));
        const Pattern pattern = random_int(0, 1) ? Pattern::gpt2 : Pattern::cl100k;
        const uint32_t vocab_size = static_cast<uint32_t>(random_int(256, 400));
        const int64_t min_frequency = random_int(1, 3);
        WordCounts counts(pattern);
        for (const std::string& text : texts) counts.add(text);
        const LearntMerges learnt =
            learn_merges(counts, vocab_size, static_cast<uint64_t>(min_frequency));
        REQUIRE(learnt.merges == naive_training(texts, pattern, vocab_size, min_frequency));
        REQUIRE(learnt.tokens.size() == 256 + learnt.merges.size());
        for (const Merge& merge : learnt.merges)
            REQUIRE(learnt.tokens[merge.result] ==
                    learnt.tokens[merge.left] + learnt.tokens[merge.right]);
    }
}

TEST_CASE("counts merged from parts are the counts of the whole, whatever the parts") {
    const auto counted = [](const WordCounts& counts) {
        std::map<std::string, uint64_t> words;
        counts.for_each([&](std::string_view piece, uint64_t count) {
            CHECK(words.emplace(piece, count).second);
        });
        CHECK(words.size() == counts.size());
        return words;
    };
    for (int round = 0; round < 30; ++round) {
        const Pattern pattern = random_int(0, 1) ? Pattern::gpt2 : Pattern::cl100k;
        std::map<std::string, uint64_t> expected;
        WordCounts whole(pattern);
        std::vector<WordCounts> parts(3, WordCounts(pattern));
        for (int64_t texts = random_int(0, 40); texts > 0; --texts) {
            std::string text = random_bytes(static_cast<size_t>(random_int(0, 200)));
            for (int64_t word = random_int(0, 60); word > 0; --word)
                text += ' ' + random_letters(static_cast<size_t>(random_int(1, 20)), 3);
            // Words that are kept apart because they are long come several times, too.
            for (int64_t word = random_int(0, 9); word > 0; --word)
                text += ' ' + std::string(static_cast<size_t>(random_int(14, 18)), 'a');
            for (const std::string_view piece : pieces_of(pattern, text))
                ++expected[std::string(piece)];
            whole.add(text);
            parts[static_cast<size_t>(random_int(0, 2))].add(text);
        }
        REQUIRE(counted(whole) == expected);
        for (const int other : {1, 2}) {
            parts[0].merge(std::move(parts[static_cast<size_t>(other)]));
            CHECK(parts[static_cast<size_t>(other)].size() == 0);
        }
        REQUIRE(counted(parts[0]) == expected);
        CHECK(Tokenizer::train(parts[0], 400).to_json() == Tokenizer::train(whole, 400).to_json());
    }
    WordCounts gpt2(Pattern::gpt2);
    CHECK(contains(error_of([&] { gpt2.merge(WordCounts(Pattern::cl100k)); }), "cl100k"));
}

TEST_CASE("training does not depend on the order of documents") {
    std::vector<std::string> documents = read_fixture("corpus.json");
    const std::string in_order = Tokenizer::train(views(documents), 500).to_json();
    std::shuffle(documents.begin(), documents.end(), test_rng());
    CHECK(Tokenizer::train(views(documents), 500).to_json() == in_order);
}

TEST_CASE(
    "a trained vocabulary has the bytes, the merges and the end of text, and no more than the text "
    "gives") {
    const Tokenizer empty = Tokenizer::train({}, 4096);
    CHECK(empty.vocab_size() == 257);
    CHECK(empty.end_of_text() == 256u);
    const std::string text = "abab";
    const std::vector<std::string_view> texts{text};
    const Tokenizer small = Tokenizer::train(texts, 4096);
    CHECK(small.vocab_size() == 259);  // ab, abab
    CHECK(small.encode(text).size() == 1);
    CHECK(small.is_special(258));
    CHECK(small.token_bytes(258) == "<|endoftext|>");
    CHECK(Tokenizer::train(texts, 258).vocab_size() == 258);
    CHECK(Tokenizer::train(texts, 4096, {Pattern::gpt2, 2}).vocab_size() == 258);
    CHECK_THROWS_AS(Tokenizer::train(texts, 256), Error);
    CHECK_THROWS_AS(Tokenizer::train(texts, 0xFFFFFFFF), Error);
}

}  // namespace train_gpt
