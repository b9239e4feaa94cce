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

/// Lines of our own making in a message, such as a table: their newlines stay.
struct Lines {
    std::string text;
};

/// A failure that the user can understand and fix: one sentence with what, where and how to fix
/// it. main() prints it on one line and exits with code 1. What it quotes may come from anywhere:
/// texts among its arguments are made printable, on one line, but for literals and Lines.
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

/// What to say of any exception: an Error's own sentence; one of ours for memory and files where
/// the standard library's would be about its functions.
std::string message_of(const std::exception& error);

/// A command line that cannot be understood: main() exits with code 2.
class UsageError : public Error {
  public:
    using Error::Error;
};

}  // namespace train_gpt
