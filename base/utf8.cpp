#include "base/utf8.h"

#include <algorithm>
#include <cstring>

namespace train_gpt {

namespace {

/// The length of the well-formed character at text[at], which is not ASCII; 0 if there is none.
size_t character_length(std::string_view text, size_t at) {
    const auto byte = [&](size_t i) {
        return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
    };
    const auto follows = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
    const unsigned lead = byte(at), second = byte(at + 1);
    if (lead >= 0xC2 && lead <= 0xDF) return follows(at + 1) ? 2 : 0;
    if (lead >= 0xE0 && lead <= 0xEF) {
        // No overlong encodings, and no surrogates.
        const unsigned low = lead == 0xE0 ? 0xA0 : 0x80, high = lead == 0xED ? 0x9F : 0xBF;
        return second >= low && second <= high && follows(at + 2) ? 3 : 0;
    }
    if (lead >= 0xF0 && lead <= 0xF4) {
        // No overlong encodings, and nothing above U+10FFFF.
        const unsigned low = lead == 0xF0 ? 0x90 : 0x80, high = lead == 0xF4 ? 0x8F : 0xBF;
        return second >= low && second <= high && follows(at + 2) && follows(at + 3) ? 4 : 0;
    }
    return 0;
}

/// The position of the first byte at or after `at` that is not ASCII, or the end.
size_t skip_ascii(std::string_view text, size_t at) {
    constexpr uint64_t high_bits = 0x8080808080808080;
    for (uint64_t words[4]; at + sizeof words <= text.size(); at += sizeof words) {
        std::memcpy(words, text.data() + at, sizeof words);
        if ((words[0] | words[1] | words[2] | words[3]) & high_bits) break;
    }
    while (at < text.size() && !(text[at] & 0x80)) ++at;
    return at;
}

bool is_control(char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte == 0x7F || (byte < 0x20 && !(byte >= '\b' && byte <= '\r') && byte != 0x1B);
}

}  // namespace

std::string_view without_byte_order_mark(std::string_view text) {
    if (text.starts_with(byte_order_mark)) text.remove_prefix(byte_order_mark.size());
    return text;
}

size_t find_not_utf8(std::string_view text, size_t from) {
    for (size_t at = from;;) {
        at = skip_ascii(text, at);
        // In text that is not ASCII, such characters follow one another.
        while (at < text.size() && (text[at] & 0x80)) {
            const size_t length = character_length(text, at);
            if (length == 0) return at;
            at += length;
        }
        if (at >= text.size()) return text.size();
    }
}

int64_t count_not_utf8(std::string_view text) {
    int64_t count = 0;
    for (size_t at = 0; (at = find_not_utf8(text, at)) < text.size(); ++at) ++count;
    return count;
}

double share_of_no_text(std::string_view bytes) {
    if (bytes.empty()) return 0;
    const int64_t controls = std::count_if(bytes.begin(), bytes.end(), is_control);
    return static_cast<double>(count_not_utf8(bytes) + controls) /
           static_cast<double>(bytes.size());
}

}  // namespace train_gpt
