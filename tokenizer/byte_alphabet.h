// GPT-2's way to write arbitrary bytes as printable text, one character per byte. Vocabulary files
// use it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace train_gpt {

/// The byte at position `index` (0..255) of the alphabet sorted by character: the printable bytes
/// 0x21-0x7E, 0xA1-0xAC, 0xAE-0xFF, which stand for themselves (as Latin-1), then the other 68,
/// which are written U+0100, U+0101, ... This is the order of the single bytes in GPT-2's
/// vocabulary and in vocabularies trained here.
uint8_t byte_at(int index);

/// Bytes in the alphabet, as UTF-8: " the" is "Ġthe".
std::string to_byte_alphabet(std::string_view bytes);

/// The inverse; nullopt when a character is not in the alphabet.
std::optional<std::string> from_byte_alphabet(std::string_view text);

}  // namespace train_gpt
