#include "tokenizer/regex_characters.h"

#include <algorithm>
#include <string>

#include "base/utf8.h"
#include "tokenizer/unicode.h"

namespace train_gpt {

namespace {

bool is_letter_or_digit(char c) {
    return is_decimal_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}
bool is_hexadecimal(char c) {
    return is_decimal_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

CodePoints negated_if(bool negated, const CodePoints& set) {
    return negated ? set.complement() : set;
}

/// The property at the cursor, which is after \p or \P.
CodePoints read_property(PatternCursor& cursor, bool in_set) {
    const size_t end = cursor.pattern.find('}', cursor.at);
    if (cursor.next() != '{' || end == std::string_view::npos)
        throw Error("it has a malformed property at byte ", cursor.at - 1);
    std::string_view name = cursor.pattern.substr(cursor.at + 1, end - cursor.at - 1);
    cursor.at = end + 1;
    const bool negated = name.starts_with('^');
    if (negated) name.remove_prefix(1);
    const std::optional<CodePoints> set = unicode_property(name);
    if (!set)
        throw refuse_in_pattern(concat("it uses the property ", name,
                                       ", which Oniguruma (the engine of Hugging Face's "
                                       "tokenizers) does not know or which depends on more than "
                                       "the character"));
    const bool is_word = !in_set && *set == *unicode_property("Word");
    return negated_if(negated, is_word ? word_characters() : *set);
}

/// The number that begins at `at` in the pattern; its digits must be all of `most`, if they are
/// `exactly` that many.
char32_t read_number(PatternCursor& cursor, size_t most, uint32_t base, bool exactly) {
    const size_t begin = cursor.at;
    uint32_t value = 0;
    for (; cursor.at < begin + most && is_hexadecimal(cursor.next()); ++cursor.at) {
        const char c = cursor.next();
        const auto digit =
            static_cast<uint32_t>(is_decimal_digit(c) ? c - '0' : (c | 32) - 'a' + 10);
        if (digit >= base) break;
        value = value * base + digit;
    }
    const size_t digits = cursor.at - begin;
    if (digits == 0 || (exactly && digits < most) || value >= CodePoints::limit ||
        (value >= 0xD800 && value < 0xE000))
        throw Error("it has a malformed code point at byte ", begin + 1);
    return value;
}

/// The character whose first byte an escape gave; escapes for its other bytes follow.
char32_t read_escaped_bytes(PatternCursor& cursor, char32_t first) {
    if (first < 0x80) return first;
    const size_t begin = cursor.at;
    std::string bytes(1, static_cast<char>(first));
    while (bytes.size() < 4 && find_not_utf8(bytes) < bytes.size() && cursor.next() == '\\' &&
           cursor.next(1) == 'x' && cursor.next(2) != '{') {
        cursor.at += 2;
        bytes += static_cast<char>(read_number(cursor, 2, 16, false));
    }
    const Utf8Character character = utf8_character(bytes, 0);
    if (character.length != bytes.size() || bytes.size() == 1)
        throw Error("it has a byte at ", begin + 1,
                    " that is not UTF-8; write characters as \\x{…}, with their number");
    return character.code;
}

char32_t read_literal(PatternCursor& cursor) {
    const Utf8Character character = utf8_character(cursor.pattern, cursor.at);
    cursor.at += character.length;
    return character.code;
}

/// The character of an escape, whose backslash the cursor is after.
char32_t read_escape(PatternCursor& cursor, bool in_set) {
    const char c = cursor.next();
    if (cursor.at_end()) throw Error("it ends in a backslash");
    if (c == 'x' && cursor.next(1) == '{') {
        cursor.at += 2;
        const char32_t code = read_number(cursor, 8, 16, false);
        if (cursor.next() != '}') throw Error("it has a malformed code point at byte ", cursor.at);
        ++cursor.at;
        return code;
    }
    if (c == '0' || (in_set && c >= '1' && c <= '7'))
        return read_escaped_bytes(cursor, read_number(cursor, 3, 8, false) & 0xFF);
    if (c == 'x' || c == 'u') {
        ++cursor.at;
        if (c == 'u') return read_number(cursor, 4, 16, true);
        return read_escaped_bytes(cursor, read_number(cursor, 2, 16, false));
    }
    constexpr std::string_view letters = "ntrfvae", controls = "\n\t\r\f\v\a\x1b";
    if (const size_t known = letters.find(c); known != letters.npos) {
        ++cursor.at;
        return static_cast<char32_t>(controls[known]);
    }
    if (in_set && c == 'b') {
        ++cursor.at;
        return '\b';
    }
    if (is_letter_or_digit(c))
        throw refuse_in_pattern(concat("it uses \\", c, in_set ? " in a set" : ""));
    return read_literal(cursor);
}

/// [:name:] or [:^name:]; nothing if the bracket at the cursor begins a set.
std::optional<CodePoints> read_posix_class(PatternCursor& cursor) {
    const size_t end = cursor.pattern.find(":]", cursor.at);
    if (cursor.next(1) != ':' || end == std::string_view::npos) return {};
    std::string_view name = cursor.pattern.substr(cursor.at + 2, end - cursor.at - 2);
    const bool negated = name.starts_with('^');
    if (negated) name.remove_prefix(1);
    if (!std::ranges::all_of(name, is_letter_or_digit)) return {};
    const std::optional<CodePoints> set = posix_class(name);
    if (!set) throw refuse_in_pattern(concat("it has the unknown class [:", name, ":]"));
    cursor.at = end + 2;
    return negated_if(negated, *set);
}

/// A character of a set, or the range that it begins.
CodePoints read_range(PatternCursor& cursor) {
    const char32_t first = read_character(cursor, true);
    if (cursor.next() != '-' || cursor.next(1) == ']') return {first, first};
    ++cursor.at;
    if (cursor.next() == '[' || read_class(cursor, true))
        throw Error("it has a range that ends in a class at byte ", cursor.at);
    const char32_t last = read_character(cursor, true);
    if (last < first) throw Error("it has an empty range in a set before byte ", cursor.at + 1);
    return {first, last};
}

}  // namespace

Error refuse_in_pattern(std::string_view what) { return Error(what, ", which is not supported"); }

bool is_decimal_digit(char c) { return c >= '0' && c <= '9'; }

std::optional<CodePoints> read_class(PatternCursor& cursor, bool in_set) {
    if (cursor.next() != '\\') return {};
    const char c = cursor.next(1), kind = static_cast<char>(c | 32);
    if (c == '\0' || std::string_view("pwdsh").find(kind) == std::string_view::npos) return {};
    cursor.at += 2;
    const bool negated = c != kind;
    if (kind == 'p') return negated_if(negated, read_property(cursor, in_set));
    if (kind == 'w' && !in_set) return negated_if(negated, word_characters());
    const char* name = kind == 'w'   ? "word"
                       : kind == 'd' ? "digit"
                       : kind == 's' ? "space"
                                     : "xdigit";
    return negated_if(negated, posix_class(name).value());
}

char32_t read_character(PatternCursor& cursor, bool in_set) {
    if (cursor.next() == '\\') {
        ++cursor.at;
        return read_escape(cursor, in_set);
    }
    return read_literal(cursor);
}

PatternSet read_set(PatternCursor& cursor) {
    ++cursor.at;
    const bool negated = cursor.next() == '^';
    if (negated) ++cursor.at;
    if (cursor.next() == ']') throw refuse_in_pattern("it has a set that begins with ]");
    CodePoints members;
    std::optional<CodePoints> before;  // what precedes the last &&
    const auto both = [&] { return before ? before->intersection(members) : members; };
    for (; cursor.next() != ']';) {
        if (cursor.at_end()) throw Error("it has a [ without a ]");
        if (cursor.next() == '&' && cursor.next(1) == '&') {
            cursor.at += 2;
            before = both();
            members = {};
        } else if (cursor.next() == '[') {
            if (const auto posix = read_posix_class(cursor)) {
                members.add(*posix);
            } else {
                const PatternSet inner = read_set(cursor);
                members.add(negated_if(inner.negated, inner.members));
            }
        } else if (const auto characters = read_class(cursor, true)) {
            members.add(*characters);
            if (cursor.next() == '-' && cursor.next(1) != ']')
                throw Error("it has a range that begins with a class at byte ", cursor.at + 1);
        } else {
            members.add(read_range(cursor));
        }
    }
    ++cursor.at;
    return {both(), negated};
}

}  // namespace train_gpt
