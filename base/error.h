// Errors are sentences: what is wrong, where, and what to do about it.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/printable.h"

namespace train_gpt {

/// Joins its arguments as `operator<<` prints them.
template <class... Args>
std::string concat(const Args&... args) {
    std::ostringstream text;
    (text << ... << args);
    return text.str();
}

/// Text that the program itself formats as lines, such as a table: its newlines are kept.
struct Lines {
    std::string text;
};

/// A failure that the user can understand and fix: one sentence that says what is wrong, where, and
/// how to fix it. main() prints it on one line and exits with code 1. Arguments may quote text from
/// anywhere: all strings except literals and Lines are made printable on one line.
class Error : public std::runtime_error {
  public:
    template <class... Args>
    explicit Error(const Args&... args) : std::runtime_error(printable(concat(shown(args)...))) {}

  private:
    static const std::string& shown(const Lines& lines) { return lines.text; }
    template <class T>
    static decltype(auto) shown(const T& part) {
        if constexpr (std::is_convertible_v<T, std::string_view> && !std::is_array_v<T>)
            return printable_line(part);
        else
            return part;
    }
};

/// The message to print for any exception. An Error has its own sentence. Exceptions of the
/// standard library about memory and files get a sentence here, because theirs would be about
/// library functions.
std::string message_of(const std::exception& error);

/// A command line that cannot be understood: main() exits with code 2.
class UsageError : public Error {
  public:
    using Error::Error;
};

}  // namespace train_gpt
