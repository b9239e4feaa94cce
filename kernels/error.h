// Errors are sentences: what is wrong, where, and what to do about it.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace train_gpt {

/// Joins its arguments as `operator<<` prints them.
template <class... Args>
std::string concat(const Args&... args) {
    std::ostringstream text;
    (text << ... << args);
    return text.str();
}

/// A failure that the user can understand and mend: one sentence with what, where and how to fix
/// it. main() prints it on one line and exits with code 1.
class Error : public std::runtime_error {
  public:
    template <class... Args>
    explicit Error(const Args&... args) : std::runtime_error(concat(args...)) {}
};

/// A command line that cannot be understood: main() exits with code 2.
class UsageError : public Error {
  public:
    using Error::Error;
};

}  // namespace train_gpt
