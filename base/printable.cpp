#include "base/printable.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>

namespace train_gpt {

namespace {

struct Character {
    uint32_t code = 0;
    size_t length = 0;  // in bytes; 0: not valid UTF-8
};

/// The first character of a non-empty text (Unicode 15, table 3-7).
Character first_character(std::string_view text) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char lead = byte(0);
    if (lead < 0x80) return {lead, 1};
    if (lead < 0xc2 || lead > 0xf4) return {};
    const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (text.size() < length) return {};
    uint32_t code = lead & (0xffu >> (length + 1));
    for (size_t i = 1; i < length; ++i) {
        if ((byte(i) & 0xc0) != 0x80) return {};
        code = code << 6 | (byte(i) & 0x3fu);
    }
    constexpr uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const bool is_surrogate = code >= 0xd800 && code < 0xe000;
    return code < least[length] || is_surrogate || code > 0x10ffff ? Character{}
                                                                   : Character{code, length};
}

bool commands_terminals(uint32_t code) {
    const bool is_control = code < 0x20 || (code >= 0x7f && code < 0xa0);
    const bool turns_direction = (code >= 0x202a && code <= 0x202e) ||  // embeddings, overrides
                                 (code >= 0x2066 && code <= 0x2069);    // isolates
    return is_control || turns_direction;
}

std::string escaped(std::string_view text, bool on_one_line) {
    std::string result;
    for (char escape[8]; !text.empty();) {
        const Character character = first_character(text);
        const char c = text.front();
        if (character.length == 0) {
            std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<unsigned char>(c));
            result += escape;
        } else if (c == '\n' || c == '\t') {
            if (on_one_line) result += '\\';
            result += !on_one_line ? c : c == '\n' ? 'n' : 't';
        } else if (commands_terminals(character.code)) {
            std::snprintf(escape, sizeof escape, "\\u%04x", character.code);
            result += escape;
        } else {
            result += text.substr(0, character.length);
        }
        text.remove_prefix(std::max<size_t>(character.length, 1));
    }
    return result;
}

}  // namespace

std::string printable(std::string_view text) { return escaped(text, false); }
std::string printable_line(std::string_view text) { return escaped(text, true); }

void blank_unprintable(std::span<char> text) {
    while (!text.empty()) {
        const Character character = first_character({text.data(), text.size()});
        const size_t length = std::max<size_t>(character.length, 1);
        if (character.length == 0 || commands_terminals(character.code))
            std::ranges::fill(text.first(length), ' ');
        text = text.subspan(length);
    }
}

size_t unfinished_utf8(std::string_view text) {
    for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
        const auto byte = static_cast<unsigned char>(text[text.size() - back]);
        if ((byte & 0xc0) == 0x80) continue;  // a continuation byte: look further
        const size_t length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
        return length > back ? back : 0;
    }
    return 0;
}

std::string shell_word(const std::string& word) {
    constexpr const char* plain =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+.,/:@%=";
    if (!word.empty() && word.find_first_not_of(plain) == word.npos) return word;
    std::string quoted = "'";
    for (const char c : word) quoted += c == '\'' ? "'\\''" : std::string(1, c);
    return quoted + "'";
}

std::string with_separators(uint64_t number) {
    std::string text = std::to_string(number);
    for (auto at = std::ssize(text) - 3; at > 0; at -= 3)
        text.insert(static_cast<size_t>(at), 1, ',');
    return text;
}

}  // namespace train_gpt
