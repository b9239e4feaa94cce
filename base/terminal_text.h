// Messages on a terminal. Files and pipes get them as they are.
#pragma once
#include <cstdio>
#include <string>
#include <string_view>

namespace train_gpt {

/// How many columns a line on `out` may fill: one less than the terminal's width, since some
/// terminals wrap a full line. 0 if it is not a terminal, or does not report its width.
int columns_of(std::FILE* out);

/// The text as a terminal of so many columns shows it; 0: as it is.
/// - A command that the text suggests has a line of its own, so that it can be copied: one in
///   backticks, or after ": " or "; run " up to ";" or the end of the line, that begins with a
///   program's name and has an argument.
/// - Lines that are too long are broken at spaces. What follows begins two columns further in than
///   the line, or below the text of a line such as "name      text" and of a line that begins ten
///   or more columns in. Longer words stay whole.
std::string text_for_terminal(std::string_view text, int columns);

/// Prints the text as `out` should show it, and ends the line.
void print_line(std::FILE* out, const std::string& text);

}  // namespace train_gpt
