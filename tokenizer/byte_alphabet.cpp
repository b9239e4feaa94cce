#include "tokenizer/byte_alphabet.h"

#include <array>

namespace train_gpt {

namespace {

constexpr int code_points = 0x144;  // 256 characters: 188 below U+0100, 68 from U+0100 on

struct ByteLetters {
    std::array<uint8_t, 256> sorted{};           // bytes by character
    std::array<uint16_t, 256> character{};       // byte -> code point
    std::array<int16_t, code_points> byte_of{};  // code point -> byte, -1 for none
};

constexpr ByteLetters make_alphabet() {
    ByteLetters alphabet;
    for (int16_t& byte : alphabet.byte_of) byte = -1;
    int place = 0;
    const auto add = [&](int byte, int code) {
        alphabet.sorted[place++] = static_cast<uint8_t>(byte);
        alphabet.character[byte] = static_cast<uint16_t>(code);
        alphabet.byte_of[code] = static_cast<int16_t>(byte);
    };
    const auto printable = [](int byte) {
        return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    };
    for (int byte = 0; byte < 256; ++byte)
        if (printable(byte)) add(byte, byte);
    int code = 0x100;
    for (int byte = 0; byte < 256; ++byte)
        if (!printable(byte)) add(byte, code++);
    return alphabet;
}

constexpr ByteLetters alphabet = make_alphabet();

}  // namespace

uint8_t byte_at(int index) { return alphabet.sorted[index]; }

std::string to_byte_alphabet(std::string_view bytes) {
    std::string text;
    text.reserve(bytes.size() + bytes.size() / 2);
    for (const char byte : bytes) {
        const int code = alphabet.character[static_cast<uint8_t>(byte)];
        if (code < 0x80) {
            text += static_cast<char>(code);
        } else {
            text += static_cast<char>(0xC0 | code >> 6);
            text += static_cast<char>(0x80 | (code & 0x3F));
        }
    }
    return text;
}

std::optional<std::string> from_byte_alphabet(std::string_view text) {
    std::string bytes;
    bytes.reserve(text.size());
    for (size_t i = 0; i < text.size(); ++i) {
        int code = static_cast<uint8_t>(text[i]);
        if (code >= 0x80) {  // no character of the alphabet is longer than two bytes
            if ((code & 0xE0) != 0xC0 || ++i == text.size()) return std::nullopt;
            code = (code & 0x1F) << 6 | (static_cast<uint8_t>(text[i]) & 0x3F);
        }
        if (code >= code_points || alphabet.byte_of[code] < 0) return std::nullopt;
        bytes += static_cast<char>(alphabet.byte_of[code]);
    }
    return bytes;
}

}  // namespace train_gpt
