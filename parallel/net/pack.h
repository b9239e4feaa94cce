// Texts in one text, and messages with a length in front of them.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt::net {

/// Eight bytes, little-endian.
std::string encode(uint64_t number);
uint64_t decode(std::string_view eight_bytes);

/// The texts, each after its length.
std::string pack(const std::vector<std::string>& texts);
/// Nothing if `packed` is not the result of pack().
std::optional<std::vector<std::string>> unpack(std::string_view packed);

}  // namespace train_gpt::net
