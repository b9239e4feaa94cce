#include "base/sha256.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

#include "base/file.h"

namespace train_gpt {

namespace {

/// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> round_constants{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian(const std::byte* bytes) {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word = word << 8 | std::to_integer<uint32_t>(bytes[i]);
    return word;
}

}  // namespace

void Sha256::take_block(const std::byte* block) {
    std::array<uint32_t, 64> w;
    for (size_t t = 0; t < 16; ++t) w[t] = big_endian(block + 4 * t);
    for (size_t t = 16; t < 64; ++t) {
        const uint32_t x = w[t - 15], y = w[t - 2];
        w[t] = (std::rotr(y, 17) ^ std::rotr(y, 19) ^ y >> 10) + w[t - 7] +
               (std::rotr(x, 7) ^ std::rotr(x, 18) ^ x >> 3) + w[t - 16];
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (size_t t = 0; t < 64; ++t) {
        const uint32_t choice = (e & f) ^ (~e & g), majority = (a & b) ^ (a & c) ^ (b & c);
        const uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + choice +
                            round_constants[t] + w[t];
        const uint32_t t2 = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + majority;
        h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<uint32_t, 8> added{a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < state_.size(); ++i) state_[i] += added[i];
}

void Sha256::add(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const size_t filled = bytes_ % block_bytes;
        if (filled == 0 && bytes.size() >= block_bytes) {
            take_block(bytes.data());
            bytes_ += block_bytes;
            bytes = bytes.subspan(block_bytes);
            continue;
        }
        const size_t n = std::min(block_bytes - filled, bytes.size());
        std::memcpy(rest_.data() + filled, bytes.data(), n);
        bytes_ += n;
        bytes = bytes.subspan(n);
        if (bytes_ % block_bytes == 0) take_block(rest_.data());
    }
}

std::string Sha256::digest() const {
    // A one bit, zeros, and the number of bits as 64 bits fill the last block.
    Sha256 padded = *this;
    std::array<std::byte, 2 * block_bytes> end{std::byte{0x80}};
    const size_t filled = bytes_ % block_bytes;
    const size_t n = (filled < block_bytes - 8 ? block_bytes : 2 * block_bytes) - filled;
    for (size_t i = 0; i < 8; ++i)
        end[n - 1 - i] = static_cast<std::byte>((8 * bytes_) >> (8 * i) & 0xff);
    padded.add(std::span(end).first(n));
    std::string hex(64, '0');
    for (size_t i = 0; i < state_.size(); ++i) {
        char word[9];
        std::snprintf(word, sizeof word, "%08x", padded.state_[i]);
        std::memcpy(hex.data() + 8 * i, word, 8);
    }
    return hex;
}

std::string sha256_of(std::string_view text) {
    Sha256 hash;
    hash.add(text);
    return hash.digest();
}

std::string sha256_of_file(const std::filesystem::path& path) {
    return sha256_of(MappedFile(path).text());
}

}  // namespace train_gpt
