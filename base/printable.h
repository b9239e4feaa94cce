// Text from files, arguments and models on its way to a terminal: control characters would command it, and bytes that are no
// UTF-8 would garble it. And numbers that are easy to read there.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace train_gpt {

/// The text with these escaped: control characters (C0 but newline and tab, DEL, C1) and those that
/// reverse the direction of writing as \uNNNN, bytes that are no valid UTF-8 as \xNN. All else
/// stays, so that a text that was escaped before stays as it is.
std::string printable(std::string_view text);

/// The same on one line: newline and tab too, as \n and \t.
std::string printable_line(std::string_view text);

/// Bytes at the end of a text that begin a UTF-8 character whose rest has not come yet.
size_t unfinished_utf8(std::string_view text);

/// 1234567 as 1,234,567.
std::string with_separators(uint64_t number);

}  // namespace train_gpt
