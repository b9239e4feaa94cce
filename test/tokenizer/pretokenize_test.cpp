#include "tokenizer/pretokenize.h"

#include "test/catch.h"
#include "test/tokenizer/reference.h"

namespace train_gpt {

namespace {

using Pieces = std::vector<std::string_view>;
constexpr Pattern patterns[] = {Pattern::gpt2, Pattern::cl100k, Pattern::cl100k_first};

}  // namespace

TEST_CASE("pieces are the matches of the published patterns") {
    const auto fixture = read_fixture("pieces.json");
    for (const Pattern pattern : patterns) {
        const auto& expected = fixture.at(pattern_name(pattern));
        REQUIRE(expected.size() == fixture.at("strings").size());
        for (size_t i = 0; i < expected.size(); ++i) {
            const std::string text = fixture.at("strings")[i];
            std::vector<size_t> lengths;
            for (const std::string_view piece : pieces_of(pattern, text))
                lengths.push_back(piece.size());
            CAPTURE(pattern_name(pattern), text);
            CHECK(lengths == expected[i].get<std::vector<size_t>>());
        }
    }
}

TEST_CASE("contractions, numbers and white space are cut as each pattern says") {
    CHECK(pieces_of(Pattern::gpt2, "I'll  say 'STOP'") ==
          Pieces{"I", "'ll", " ", " say", " '", "STOP", "'"});
    CHECK(pieces_of(Pattern::cl100k, "I'LL  say 'STOP'") ==
          Pieces{"I", "'LL", " ", " say", " '", "STOP", "'"});
    CHECK(pieces_of(Pattern::gpt2, "I'LL") == Pieces{"I", "'", "LL"});
    CHECK(pieces_of(Pattern::cl100k, "a'\u017Fb") == Pieces{"a", "'\u017F", "b"});
    CHECK(pieces_of(Pattern::gpt2, "a'\u017Fb") == Pieces{"a", "'", "\u017Fb"});
    CHECK(pieces_of(Pattern::gpt2, " 1234567") == Pieces{" 1234567"});
    CHECK(pieces_of(Pattern::cl100k, " 1234567") == Pieces{" ", "123", "456", "7"});
    CHECK(pieces_of(Pattern::gpt2, "a \n\n b") == Pieces{"a", " \n\n", " b"});
    CHECK(pieces_of(Pattern::cl100k, "a.\r\n\n  b") == Pieces{"a", ".\r\n\n", " ", " b"});
    CHECK(pieces_of(Pattern::cl100k, "\tx\nx") == Pieces{"\tx", "\n", "x"});
    CHECK(pieces_of(Pattern::cl100k, "a \n  ") == Pieces{"a", " \n  "});
    CHECK(pieces_of(Pattern::cl100k_first, "a \n  ") == Pieces{"a", " \n", "  "});
}

TEST_CASE("pieces follow one another and cover any bytes") {
    for (int round = 0; round < 300; ++round) {
        const std::string text = random_bytes(static_cast<size_t>(random_int(1, 300)));
        for (const Pattern pattern : patterns) {
            std::string joined;
            for (const std::string_view piece : pieces_of(pattern, text)) {
                REQUIRE_FALSE(piece.empty());
                joined += piece;
            }
            REQUIRE(joined == text);
        }
    }
}

TEST_CASE("a byte outside well-formed UTF-8 is a symbol of its own") {
    // A continuation byte, leads that never occur, cut characters, overlong forms, a surrogate,
    // values past U+10FFFF.
    for (const std::string bad :
         {"\x80", "\xC0", "\xFF", "\xC3", "\xE4\xB8", "\xF0\x9F\x91", "\xC0\xAF", "\xE0\x80\xAF",
          "\xF0\x80\x80\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80"}) {
        CAPTURE(bad.size(), static_cast<int>(static_cast<uint8_t>(bad[0])));
        const std::string inside = "a" + bad + "b", after_space = " " + bad + "1";
        CHECK(pieces_of(Pattern::gpt2, inside) == Pieces{"a", bad, "b"});
        CHECK(pieces_of(Pattern::gpt2, after_space) == Pieces{" " + bad, "1"});
        // cl100k: one symbol goes with the letters after it; several stay together before them.
        if (bad.size() == 1)
            CHECK(pieces_of(Pattern::cl100k, inside) == Pieces{"a", bad + "b"});
        else
            CHECK(pieces_of(Pattern::cl100k, inside) == Pieces{"a", bad, "b"});
    }
}

}  // namespace train_gpt
