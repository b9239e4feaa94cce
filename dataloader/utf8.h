// Whether bytes are text: well-formed UTF-8, and not mostly what no text has.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace train_gpt {

/// What a UTF-8 file of some programs begins with; no part of the text.
constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";
std::string_view without_byte_order_mark(std::string_view text);

/// The first byte from `from` on that belongs to no well-formed UTF-8 character (Unicode 15, table
/// 3-7); text.size() when there is none.
size_t find_not_utf8(std::string_view text, size_t from = 0);

/// How many bytes belong to no well-formed UTF-8 character. Those of two texts add up to those of
/// both joined where one of the two bytes at the border is ASCII.
int64_t count_not_utf8(std::string_view text);

/// The share of bytes that text has not: those of count_not_utf8(), and control characters other
/// than white space, backspace and escape. Near a half for compressed data and programs; below 0.2
/// for text of the Latin alphabet in one of the encodings with a byte per character.
double share_of_no_text(std::string_view bytes);

/// From this share on, a file is taken for something else than text.
constexpr double max_share_of_no_text = 0.3;

}  // namespace train_gpt
