// Text as std::printf writes it, and times.
#pragma once
#include <cstdint>
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

/// "2026-03-01 14:05 UTC"; empty for a time that has no year.
std::string utc_time(int64_t seconds_since_1970);

}  // namespace train_gpt
