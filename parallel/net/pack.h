// Packs several texts into one, and numbers into bytes.
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

/// Returns the texts one after the other, each after its length.
std::string pack(const std::vector<std::string>& texts);
/// Returns the texts that pack() was given; nothing if `packed` is not a result of pack().
std::optional<std::vector<std::string>> unpack(std::string_view packed);

}  // namespace train_gpt::net
