// The checksum CRC-32.
#include "base/crc32.h"

#include "test/catch.h"
#include "test/random.h"

using namespace train_gpt;

TEST_CASE("CRC-32 is the published one, at every length and alignment") {
    CHECK(crc32("") == 0);
    CHECK(crc32("123456789") == 0xCBF43926u);
    for (int trial = 0; trial < 50; ++trial) {
        std::string bytes(static_cast<size_t>(random_int(0, 100)), '\0');
        for (char& byte : bytes) byte = static_cast<char>(random_int(0, 255));
        const size_t from = static_cast<size_t>(random_int(0, std::ssize(bytes)));
        const std::string_view part = std::string_view(bytes).substr(from);
        uint32_t expected = ~0u;  // bit by bit
        for (const char byte : part) {
            expected ^= static_cast<uint8_t>(byte);
            for (int i = 0; i < 8; ++i) expected = expected >> 1 ^ (expected & 1 ? 0xEDB88320u : 0);
        }
        CAPTURE(part.size());
        CHECK(crc32(part) == ~expected);
    }
}
