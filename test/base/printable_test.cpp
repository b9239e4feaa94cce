// Text on its way to a terminal.
#include "base/printable.h"

#include <regex>
#include <string>

#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

TEST_CASE("printable text has no control characters and is valid UTF-8, whatever the bytes") {
    for (int round = 0; round < 200; ++round) {
        std::string bytes;
        for (int64_t n = random_int(0, 60); n > 0; --n)
            bytes += static_cast<char>(random_int(0, 1) ? random_int(0, 255) : random_int(0, 0x9f));
        const std::string text = printable_line(bytes);
        CAPTURE(bytes, text);
        for (size_t i = 0; i < text.size(); ++i) {
            const auto c = static_cast<unsigned char>(text[i]);
            REQUIRE(c >= 0x20);
            REQUIRE(c != 0x7f);
            // C1 in UTF-8 begins with 0xc2 and a byte below 0xa0.
            if (c == 0xc2) REQUIRE(static_cast<unsigned char>(text.at(i + 1)) >= 0xa0);
        }
        CHECK(printable(text) == text);  // so all of it is valid
    }
}

TEST_CASE("control characters and bad UTF-8 are shown by their codes, and all other text stays") {
    CHECK(printable("\x1b]0;owned\x07") == "\\u001b]0;owned\\u0007");
    CHECK(printable("a\r\x7f") == "a\\u000d\\u007f");
    CHECK(printable("\xc2\x9b"
                    "31m") == "\\u009b31m");
    CHECK(printable("\xe2\x80\xae") == "\\u202e");
    CHECK(printable("\xff\xc0\xaf\xed\xa0\x80\xf4\x90\x80\x80") ==
          "\\xff\\xc0\\xaf\\xed\\xa0\\x80\\xf4\\x90\\x80\\x80");
    CHECK(printable("\xe2\x82") == "\\xe2\\x82");
    CHECK(printable(std::string("\0", 1)) == "\\u0000");
    const std::string text = "größer → 語 😀 \\n";
    CHECK(printable(text) == text);
    CHECK(printable("two\n\tlines") == "two\n\tlines");
    CHECK(printable_line("two\n\tlines") == "two\\n\\tlines");
}

TEST_CASE("an error is one line of printable text, whatever it quotes") {
    const std::string name = "a\nb\x1b[31m";
    CHECK(std::string(Error(name, " and ", name.c_str()).what()) ==
          "a\\nb\\u001b[31m and a\\nb\\u001b[31m");
    CHECK(std::string(Error("the plan:\n", Lines{"  one\n  two"}, 3).what()) ==
          "the plan:\n  one\n  two3");
    CHECK(message_of(std::runtime_error("x\x1b")) == "x\\u001b");
    CHECK(contains(
        message_of(std::filesystem::filesystem_error(
            "cannot frobnicate", "some/file", std::make_error_code(std::errc::permission_denied))),
        "cannot use some/file: Permission denied"));
}

TEST_CASE("blanked text is printable and differs from the original only in unprintable bytes") {
    for (int round = 0; round < 200; ++round) {
        std::string bytes;
        for (int64_t n = random_int(0, 60); n > 0; --n)
            bytes += random_int(0, 1) ? std::string(1, static_cast<char>(random_int(0, 255))) : "ö";
        std::string text = bytes;
        blank_unprintable(text);
        CAPTURE(bytes, text);
        CHECK(printable_line(text) == text);
        REQUIRE(text.size() == bytes.size());
        std::string kept = printable_line(bytes);  // with each escape made as many spaces as bytes
        kept = std::regex_replace(
            kept, std::regex(R"(\\x[0-9a-f]{2}|\\[nt]|\\u00[01][0-9a-f]|\\u007f)"), " ");
        kept = std::regex_replace(kept, std::regex(R"(\\u00[89][0-9a-f])"), "  ");
        kept = std::regex_replace(kept, std::regex(R"(\\u20[0-9a-f]{2})"), "   ");
        if (!contains(bytes, "\\")) CHECK(text == kept);
    }
}

TEST_CASE("numbers are printed with thousands separators") {
    CHECK(with_separators(0) == "0");
    CHECK(with_separators(999) == "999");
    CHECK(with_separators(1000) == "1,000");
    CHECK(with_separators(123456) == "123,456");
    CHECK(with_separators(18446744073709551615u) == "18,446,744,073,709,551,615");
}
