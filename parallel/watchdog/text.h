// Texts of bounded length. A process may fail because memory is exhausted, so the watchdog's thread
// allocates no memory for its messages after all ranks have joined.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>

#include "base/printable.h"

namespace train_gpt::watchdog {

/// A text of fewer than n bytes on one line, safe for a terminal. Longer text is truncated. A Text
/// made from another Text's characters is equal to it, so that all ranks hold the same line.
template <size_t n>
class Text {
  public:
    Text() = default;
    explicit Text(std::string_view text) {
        const size_t fitting = std::min(text.size(), n - 1);
        std::copy_n(text.data(), fitting, chars_.data());
        const size_t length = std::strlen(chars_.data());
        const size_t whole = length - unfinished_utf8({chars_.data(), length});
        std::ranges::fill(std::span(chars_).subspan(whole), '\0');
        blank_unprintable(std::span(chars_).first(whole));
    }
    const char* c_str() const { return chars_.data(); }
    std::span<const char, n> chars() const { return chars_; }

  private:
    std::array<char, n> chars_{};
};
using Name = Text<64>;
using Line = Text<1024>;

[[gnu::format(printf, 1, 2)]] Line line(const char* format, ...);

/// Prints "train_gpt: " and the text on standard error. Does not use stdio, whose lock the main
/// thread may hold. Prints nothing if standard error accepts no data within a second.
void print(const Line& text);

}  // namespace train_gpt::watchdog
