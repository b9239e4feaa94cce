#include "tokenizer/pretokenize.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "base/utf8.h"
#include "tokenizer/unicode.h"

namespace train_gpt {

namespace {

enum class CharClass : uint8_t { other, letter, number, space };

/// The class of every code point below size(); all higher ones are `other`. A flat table, because
/// searching the ranges for each character would take most of the time on non-English text.
std::vector<CharClass> make_class_table() {
    std::vector<CharClass> table;
    const auto fill = [&table](const CodePoints& set, CharClass value) {
        const std::vector<char32_t>& edges = set.edges();
        if (table.size() < edges.back()) table.resize(edges.back());
        for (size_t i = 0; i < edges.size(); i += 2)
            std::fill(table.begin() + edges[i], table.begin() + edges[i + 1], value);
    };
    fill(unicode_property("L").value(), CharClass::letter);
    fill(unicode_property("N").value(), CharClass::number);
    fill(unicode_property("White_Space").value(), CharClass::space);
    return table;
}

CharClass class_of(char32_t code) {
    static const std::vector<CharClass> table = make_class_table();
    return code < table.size() ? table[code] : CharClass::other;
}

/// Classes of the bytes below 0x80. Each is a character.
constexpr std::array<CharClass, 128> ascii_classes = [] {
    std::array<CharClass, 128> classes{};
    for (int c = 'A'; c <= 'Z'; ++c) classes[c] = classes[c - 'A' + 'a'] = CharClass::letter;
    for (int c = '0'; c <= '9'; ++c) classes[c] = CharClass::number;
    for (const unsigned char c : {' ', '\t', '\n', '\v', '\f', '\r'}) classes[c] = CharClass::space;
    return classes;
}();

struct Char {
    CharClass kind;
    uint8_t length;  // bytes
};

/// The character at `at`.
Char char_at(std::string_view text, size_t at) {
    const uint8_t byte = static_cast<uint8_t>(text[at]);
    if (byte < 0x80) return {ascii_classes[byte], 1};
    const Utf8Character character = utf8_character(text, at);
    return {class_of(character.code), character.length};
}

/// How many of the eight bytes are ASCII letters, counted up to the first that is not.
int count_letters(uint64_t bytes) {
    static_assert(std::endian::native == std::endian::little, "the first byte is the lowest");
    constexpr uint64_t each = 0x0101010101010101u, top = 0x80 * each;
    // With the top bits cleared, no sum carries into the next byte: it is at most 0x7F + 0x1F.
    const uint64_t lower = (bytes & ~top) | 0x20 * each;
    const uint64_t from_a = lower + (0x80 - 'a') * each, beyond_z = lower + (0x7F - 'z') * each;
    return std::countr_zero((~from_a | beyond_z | bytes) & top) / 8;
}

/// The first position at or after `at` that does not hold an ASCII letter.
size_t skip_ascii_letters(std::string_view text, size_t at) {
    for (uint64_t bytes; at + sizeof bytes <= text.size(); at += sizeof bytes) {
        std::memcpy(&bytes, text.data() + at, sizeof bytes);
        if (const int letters = count_letters(bytes); letters < 8)
            return at + static_cast<size_t>(letters);
    }
    while (at < text.size() && count_letters(static_cast<uint8_t>(text[at])) > 0) ++at;
    return at;
}

/// The first position at or after `at` whose character is not of class `kind`.
size_t skip(CharClass kind, std::string_view text, size_t at) {
    for (;;) {
        if (kind == CharClass::letter) at = skip_ascii_letters(text, at);
        if (at == text.size()) return at;
        const Char next = char_at(text, at);
        if (next.kind != kind) return at;
        at += next.length;
    }
}

bool is_line_break(char c) { return c == '\r' || c == '\n'; }

/// A run of white space at the start of a text.
struct SpaceRun {
    size_t end = 0;               // bytes
    size_t last_char = 0;         // where its last character starts
    size_t after_line_break = 0;  // end of the last \r or \n in it; 0 if there is none
};

SpaceRun space_run(std::string_view text) {
    SpaceRun run;
    while (run.end < text.size()) {
        const Char next = char_at(text, run.end);
        if (next.kind != CharClass::space) break;
        run.last_char = run.end;
        run.end += next.length;
        if (is_line_break(text[run.last_char])) run.after_line_break = run.end;
    }
    return run;
}

/// `\s+(?!\S)|\s+`: the whole run if it ends the text; otherwise all but its last character, which
/// belongs to the next piece; a run of one character is a piece.
size_t match_spaces(std::string_view text, const SpaceRun& run) {
    return run.end == text.size() || run.last_char == 0 ? run.end : run.last_char;
}

/// Length of the contraction at the start of a text ('s 't 'm 'd 're 've 'll), or 0. When case is
/// ignored, the long s (U+017F) also matches s, by Unicode's simple case folding.
size_t match_contraction(std::string_view text, bool ignore_case) {
    if (text.size() < 2 || text[0] != '\'') return 0;
    const auto letter = [&](size_t i) {
        const char c = text[i];
        return ignore_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    };
    const char first = letter(1);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
    if (text.size() < 3) return 0;
    const char second = letter(2);
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') ||
        (first == 'l' && second == 'l'))
        return 3;
    return ignore_case && text.substr(1, 2) == "\u017F" ? 3 : 0;
}

size_t first_piece_gpt2(std::string_view text) {
    if (const size_t length = match_contraction(text, false)) return length;
    const size_t start = text[0] == ' ' ? 1 : 0;
    if (start < text.size()) {
        const Char first = char_at(text, start);
        if (first.kind != CharClass::space) return skip(first.kind, text, start + first.length);
    }
    return match_spaces(text, space_run(text));
}

size_t first_piece_cl100k(std::string_view text, int most_digits, bool whole_final_space) {
    if (const size_t length = match_contraction(text, true)) return length;

    const Char first = char_at(text, 0);
    size_t at = first.length;
    if (first.kind == CharClass::letter) return skip(CharClass::letter, text, at);
    if (first.kind == CharClass::number) {
        for (int digits = 1; digits < most_digits && at < text.size(); ++digits) {
            const Char next = char_at(text, at);
            if (next.kind != CharClass::number) break;
            at += next.length;
        }
        return at;
    }
    if (at < text.size()) {
        const Char next = char_at(text, at);
        if (next.kind == CharClass::letter && !is_line_break(text[0]))
            return skip(CharClass::letter, text, at + next.length);
        if (text[0] == ' ' && next.kind == CharClass::other) at += next.length;
    }
    if (first.kind == CharClass::other || at > first.length) {
        at = skip(CharClass::other, text, at);
        while (at < text.size() && is_line_break(text[at])) ++at;
        return at;
    }

    const SpaceRun run = space_run(text);
    if (whole_final_space && run.end == text.size()) return run.end;
    if (run.after_line_break > 0) return run.after_line_break;
    return match_spaces(text, run);
}

/// The spellings of each pattern in tokenizer.json files; the first spelling of a pattern is the
/// one written. All spellings of a pattern mean the same to Oniguruma, the engine of Hugging Face's
/// tokenizers. (tiktoken's spelling of cl100k does not: in Oniguruma, \p{N}{1,3}+ matches numbers
/// of any length and $ matches the end of any line.)
constexpr std::array<std::pair<Pattern, std::string_view>, 5> pattern_spellings{{
    {Pattern::gpt2,
     R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
    {Pattern::gpt2, R"('(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
    {Pattern::cl100k,
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
     R"(|\s+(?![\s\S])|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {Pattern::cl100k_first,
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
     R"(|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {Pattern::qwen2,
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
     R"(|\s*[\r\n]+|\s+(?!\S)|\s+)"},
}};

}  // namespace

constexpr std::string_view o200k_regex =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+)"
    R"([\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

constexpr std::string_view single_digits_regex = R"([\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}])";
constexpr std::string_view whole_numbers_regex =
    R"([\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}]+)";

namespace {

/// Published patterns that PCRE2 cuts by.
constexpr std::string_view published_patterns[] = {
    o200k_regex,
    single_digits_regex,
    whole_numbers_regex,
    R"(\p{N})",       // single digits, before another pattern
    R"(\p{N}+)",      // whole numbers
    R"(\p{N}{1,3})",  // DeepSeek-V3's first pattern of three
    "[一-龥぀-ゟ゠-ヿ]+",
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)"
    R"(| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    // Tekken (Mistral)
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
};

}  // namespace

const char* pattern_name(Pattern pattern) {
    switch (pattern) {
        case Pattern::gpt2:
            return "gpt2";
        case Pattern::cl100k:
            return "cl100k";
        case Pattern::cl100k_first:
            return "cl100k_first";
        case Pattern::qwen2:
            return "qwen2";
    }
    return "unknown";
}

std::string regex_of(Pattern pattern) {
    const auto is_it = [=](const auto& spelling) { return spelling.first == pattern; };
    return std::string(std::ranges::find_if(pattern_spellings, is_it)->second);
}

std::optional<Pattern> known_pattern(std::string_view regex) {
    const auto is_it = [=](const auto& spelling) { return spelling.second == regex; };
    const auto found = std::ranges::find_if(pattern_spellings, is_it);
    return found == pattern_spellings.end() ? std::nullopt : std::optional(found->first);
}

bool respects_encodable_cuts(std::string_view regex) {
    return known_pattern(regex) ||
           std::ranges::find(published_patterns, regex) != std::end(published_patterns);
}

bool matches_everything(std::string_view regex) {
    return respects_encodable_cuts(regex) && regex.ends_with(R"(\s+(?!\S)|\s+)");
}

size_t first_piece(Pattern pattern, std::string_view text) {
    if (pattern == Pattern::gpt2) return first_piece_gpt2(text);
    return first_piece_cl100k(text, pattern == Pattern::qwen2 ? 1 : 3, pattern == Pattern::cl100k);
}

bool ends_in_letter_or_number(std::string_view text) {
    size_t at = text.size();
    do {
        if (at == 0 || text.size() - at == 4) return false;
        --at;
    } while ((text[at] & 0xC0) == 0x80);
    const Char last = char_at(text, at);
    return at + last.length == text.size() &&
           (last.kind == CharClass::letter || last.kind == CharClass::number);
}

}  // namespace train_gpt
