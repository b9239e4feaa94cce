#include "parallel/net/pack.h"

namespace train_gpt::net {

std::string encode(uint64_t number) {
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(number >> 8 * i);
    return bytes;
}

uint64_t decode(std::string_view eight_bytes) {
    uint64_t number = 0;
    for (size_t i = 0; i < 8; ++i)
        number |= uint64_t{static_cast<uint8_t>(eight_bytes[i])} << 8 * i;
    return number;
}

std::string pack(const std::vector<std::string>& texts) {
    std::string packed;
    for (const std::string& text : texts) packed += encode(text.size()) + text;
    return packed;
}

std::optional<std::vector<std::string>> unpack(std::string_view packed) {
    std::vector<std::string> texts;
    while (!packed.empty()) {
        if (packed.size() < 8) return {};
        const uint64_t size = decode(packed);
        packed.remove_prefix(8);
        if (size > packed.size()) return {};
        texts.emplace_back(packed.substr(0, size));
        packed.remove_prefix(size);
    }
    return texts;
}

}  // namespace train_gpt::net
