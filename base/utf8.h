// Whether bytes are text: well-formed UTF-8 with few control characters.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace train_gpt {

/// The byte order mark that some programs write at the start of a UTF-8 file; not part of the text.
constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";
std::string_view without_byte_order_mark(std::string_view text);

/// A character and its length in bytes.
struct Utf8Character {
    char32_t code;
    uint8_t length;
};
/// The character at text[at]; a byte that belongs to no well-formed character counts as U+FFFD.
/// UTF-8 is strict (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF.
inline Utf8Character utf8_character(std::string_view text, size_t at) {
    const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[at + i]); };
    const uint8_t lead = byte(0);
    if (lead < 0x80) return {lead, 1};
    constexpr Utf8Character invalid{0xFFFD, 1};
    const uint8_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                           : lead >= 0xE0 && lead <= 0xEF ? 3
                           : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                          : 0;
    if (length == 0 || text.size() - at < length) return invalid;
    char32_t code = lead & (0x7F >> length);
    for (size_t i = 1; i < length; ++i) {
        if ((byte(i) & 0xC0) != 0x80) return invalid;
        code = code << 6 | (byte(i) & 0x3F);
    }
    const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
    const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
    if (overlong || surrogate || code > 0x10FFFF) return invalid;
    return {code, length};
}

/// The position of the first byte at or after `from` that belongs to no well-formed UTF-8 character
/// (Unicode 15, table 3-7); text.size() if there is none.
size_t find_not_utf8(std::string_view text, size_t from = 0);

/// The number of bytes that belong to no well-formed UTF-8 character. The counts of two texts add
/// up to the count of both joined if one of the two bytes at the boundary is ASCII.
int64_t count_not_utf8(std::string_view text);

/// The share of bytes that do not occur in text. These are the bytes that count_not_utf8() counts,
/// and control characters other than white space, backspace and escape. The share is near 0.5 for
/// compressed data and programs. It is below 0.2 for text in the Latin alphabet in one of the
/// single-byte encodings.
double share_of_no_text(std::string_view bytes);

/// A file with at least this share is not considered text.
constexpr double max_share_of_no_text = 0.3;

}  // namespace train_gpt
