// SHA-256 (FIPS 180-4). Unlike XXH3 (base/hash.h), nobody can choose bytes that have a given hash.
// About 0.3 GB/s: for texts and programs, not for weights.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace train_gpt {

class Sha256 {
  public:
    void add(std::span<const std::byte> bytes);
    void add(std::string_view text) { add(std::as_bytes(std::span(text.data(), text.size()))); }
    /// The hash of all bytes so far: 64 hex digits. More bytes may follow.
    std::string digest() const;

  private:
    static constexpr size_t block_bytes = 64;
    void take_block(const std::byte* block);

    std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<std::byte, block_bytes> rest_{};  // the first bytes_ % block_bytes of it count
    uint64_t bytes_ = 0;
};

/// The hash of a text: 64 hex digits.
std::string sha256_of(std::string_view text);
/// The hash of a file's contents. Throws Error if the file cannot be read.
std::string sha256_of_file(const std::filesystem::path& path);

}  // namespace train_gpt
