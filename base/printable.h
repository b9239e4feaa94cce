// Text from files, arguments and models, made safe for a terminal, which would obey control
// characters and garble invalid UTF-8. Also numbers that are easy to read.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace train_gpt {

/// The text with escapes: \uNNNN for control characters (C0 except newline and tab, DEL, C1) and
/// for characters that change the direction of writing, \xNN for bytes that are not valid UTF-8.
/// Everything else is unchanged, so escaping a text twice is the same as escaping it once.
std::string printable(std::string_view text);

/// The same on one line: newline and tab are also escaped, as \n and \t.
std::string printable_line(std::string_view text);

/// Replaces in place what printable_line() would escape, byte by byte with spaces. Allocates
/// nothing.
void blank_unprintable(std::span<char> text);

/// The number of bytes at the end of a text that begin an incomplete UTF-8 character.
size_t unfinished_utf8(std::string_view text);

/// A word as a shell's command line has it: in quotes if it has characters that mean something
/// there.
std::string shell_word(const std::string& word);

/// 1234567 becomes 1,234,567.
std::string with_separators(uint64_t number);

}  // namespace train_gpt
