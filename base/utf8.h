// Whether bytes are text: well-formed UTF-8 with few control characters.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace train_gpt {

/// The byte order mark that some programs write at the start of a UTF-8 file; not part of the text.
constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";
std::string_view without_byte_order_mark(std::string_view text);

/// The position of the first byte at or after `from` that belongs to no well-formed UTF-8 character
/// (Unicode 15, table 3-7); text.size() if there is none.
size_t find_not_utf8(std::string_view text, size_t from = 0);

/// The number of bytes that belong to no well-formed UTF-8 character. The counts of two texts add
/// up to the count of both joined if one of the two bytes at the boundary is ASCII.
int64_t count_not_utf8(std::string_view text);

/// The share of bytes that do not occur in text: those of count_not_utf8(), and control characters
/// other than white space, backspace and escape. Near 0.5 for compressed data and programs; below
/// 0.2 for text in the Latin alphabet in one of the single-byte encodings.
double share_of_no_text(std::string_view bytes);

/// A file with at least this share is not considered text.
constexpr double max_share_of_no_text = 0.3;

}  // namespace train_gpt
