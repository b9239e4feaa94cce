#include "base/crc32.h"

#include <array>
#include <bit>
#include <cstring>

namespace train_gpt {

static_assert(std::endian::native == std::endian::little, "eight bytes are read as one number");

namespace {

constexpr size_t stride = 8;

/// tables[k][b] is the checksum of the byte b followed by k zero bytes, so that eight bytes need
/// eight independent look-ups (Kounavis and Berry, 2005).
constexpr auto tables = [] {
    std::array<std::array<uint32_t, 256>, stride> all{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        all[0][byte] = crc;
    }
    for (size_t k = 1; k < stride; ++k)
        for (size_t byte = 0; byte < 256; ++byte)
            all[k][byte] = all[k - 1][byte] >> 8 ^ all[0][all[k - 1][byte] & 0xFF];
    return all;
}();

}  // namespace

uint32_t crc32(std::string_view bytes) {
    uint32_t crc = 0xFFFFFFFFu;
    for (; bytes.size() >= stride; bytes.remove_prefix(stride)) {
        uint64_t eight;
        std::memcpy(&eight, bytes.data(), sizeof eight);
        eight ^= crc;
        crc = 0;
        for (size_t i = 0; i < stride; ++i) crc ^= tables[stride - 1 - i][eight >> 8 * i & 0xFF];
    }
    for (const char byte : bytes)
        crc = crc >> 8 ^ tables[0][(crc ^ static_cast<uint8_t>(byte)) & 0xFF];
    return ~crc;
}

}  // namespace train_gpt
