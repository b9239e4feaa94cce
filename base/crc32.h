// The checksum CRC-32 of gzip, PNG and Parquet.
#pragma once
#include <cstdint>
#include <string_view>

namespace train_gpt {

/// CRC-32 with the polynomial 0x04C11DB7, reflected (ISO 3309): of "123456789" it is 0xCBF43926.
uint32_t crc32(std::string_view bytes);

}  // namespace train_gpt
