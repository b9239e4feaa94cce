// Text of any characters.
#pragma once
#include <cstdint>
#include <string>

namespace train_gpt {

/// UTF-8 of a code point, as RFC 3629 writes it.
inline std::string utf8(int64_t code) {
    const auto byte = [](int64_t value) { return std::string(1, static_cast<char>(value)); };
    const auto more = [&](int shift) { return byte(0x80 | (code >> shift & 0x3F)); };
    if (code < 0x80) return byte(code);
    if (code < 0x800) return byte(0xC0 | code >> 6) + more(0);
    if (code < 0x10000) return byte(0xE0 | code >> 12) + more(6) + more(0);
    return byte(0xF0 | code >> 18) + more(12) + more(6) + more(0);
}

}  // namespace train_gpt
