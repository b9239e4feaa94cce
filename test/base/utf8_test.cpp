#include "base/utf8.h"

#include <cmath>
#include <string>

#include "test/catch.h"
#include "test/random.h"
#include "test/utf8.h"

using namespace train_gpt;

namespace {

int64_t random_code() {
    static constexpr int64_t last[]{0x7F, 0x7FF, 0xFFFF, 0x10FFFF};
    for (;;) {
        const int64_t code = random_int(0, last[random_int(0, 3)]);
        if (code < 0xD800 || code > 0xDFFF) return code;
    }
}

std::string random_text(int64_t characters) {
    std::string text;
    while (characters-- > 0)
        text +=
            random_int(0, 1) ? utf8(random_code()) : std::string(size_t(random_int(0, 70)), 'a');
    return text;
}

}  // namespace

TEST_CASE("every code point but surrogates is UTF-8, and each of its parts is not") {
    std::string all;
    int64_t wrong = 0;
    for (int64_t code = 0; code <= 0x10FFFF; ++code) {
        const std::string one = utf8(code);
        const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
        wrong += count_not_utf8(one) != (surrogate ? 3 : 0);
        for (size_t n = 1; n < one.size(); ++n)
            wrong += count_not_utf8(one.substr(0, n)) != static_cast<int64_t>(n);
        if (one.size() > 1) wrong += count_not_utf8(one.substr(1)) != std::ssize(one) - 1;
    }
    CHECK(wrong == 0);
    // Overlong forms, values past the last code point, and bytes that never begin a character.
    for (const std::string bad : {"\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xF0\x8F\xBF\xBF",
                                  "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\x80"})
        CHECK(count_not_utf8("ab" + bad + "c") == std::ssize(bad));
}

TEST_CASE("every code point is read back, and a byte that is none is U+FFFD") {
    int64_t wrong = 0;
    for (int64_t code = 0; code <= 0x10FFFF; ++code) {
        if (code >= 0xD800 && code <= 0xDFFF) continue;
        const std::string one = "\xFF" + utf8(code) + "\xFF";
        const Utf8Character read = utf8_character(one, 1);
        wrong += read.code != static_cast<char32_t>(code) || read.length != one.size() - 2;
    }
    CHECK(wrong == 0);
    for (int round = 0; round < 1000; ++round) {
        std::string text = random_text(random_int(0, 5));
        for (int64_t damage = random_int(0, 5); damage > 0 && !text.empty(); --damage)
            text[static_cast<size_t>(random_int(0, std::ssize(text) - 1))] =
                static_cast<char>(random_int(0x80, 0xFF));
        for (size_t at = 0; at < text.size();) {
            const Utf8Character read = utf8_character(text, at);
            const bool is_bad = find_not_utf8(text, at) == at;
            REQUIRE((read.code == 0xFFFD && read.length == 1) == is_bad);
            at += read.length;
        }
    }
}

TEST_CASE("bytes that break UTF-8 are counted, and the first is found") {
    for (int round = 0; round < 300; ++round) {
        std::string text;
        size_t first = std::string::npos;
        int64_t bad = 0;
        for (int64_t parts = random_int(1, 6); parts > 0; --parts) {
            text += random_text(random_int(0, 20));
            if (random_int(0, 1)) continue;
            const auto n = static_cast<size_t>(random_int(1, 5));
            first = std::min(first, text.size());
            bad += static_cast<int64_t>(n);
            text += std::string(n, static_cast<char>(random_int(0xF8, 0xFF)));
        }
        CAPTURE(round, text.size());
        CHECK(count_not_utf8(text) == bad);
        CHECK(find_not_utf8(text) == std::min(first, text.size()));
        // Split in two, with ASCII at the boundary, there are as many.
        const auto at = static_cast<size_t>(random_int(0, std::ssize(text)));
        const std::string left = text.substr(0, at) + "\n", right = text.substr(at);
        CHECK(count_not_utf8(left + right) == count_not_utf8(left) + count_not_utf8(right));
    }
}

TEST_CASE("random bytes are mostly not text, and text in a Latin encoding mostly is") {
    std::string random(20000, '\0'), zeros = random, latin, cyrillic;
    for (char& byte : random) byte = static_cast<char>(random_int(0, 255));
    for (size_t i = 0; i < zeros.size(); i += 4) zeros[i] = static_cast<char>(random_int(0, 127));
    for (int i = 0; i < 3000; ++i) {
        // In Latin-1, one letter in seven with an accent; in KOI8-R, words and spaces.
        latin += "fianc\xE9 ";
        cyrillic += "\xD4\xC5\xCB\xD3\xD4 ";
    }
    CHECK(share_of_no_text(random) > 0.4);
    CHECK(share_of_no_text(zeros) > 0.5);
    CHECK(share_of_no_text(cyrillic) > max_share_of_no_text);
    CHECK(std::abs(share_of_no_text(latin) - 1 / 7.0) < 1e-3);
    CHECK(share_of_no_text("") == 0);
    CHECK(share_of_no_text("tabs\t, \f, \x1B[1mescapes\x1B[0m and o\b_\r\n") == 0);
}
