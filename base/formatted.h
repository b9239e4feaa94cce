// Text as std::printf writes it.
#pragma once
#include <cstdio>
#include <string>

namespace train_gpt {

/// The text that std::printf would write, up to 255 bytes of it: for numbers and short words.
template <class... Args>
std::string formatted(const char* format, Args... args) {
    char text[256];
    std::snprintf(text, sizeof text, format, args...);
    return text;
}

}  // namespace train_gpt
