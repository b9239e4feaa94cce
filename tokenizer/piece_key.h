// Short pieces of text as numbers.
#pragma once
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace train_gpt {

/// A piece of at most 15 bytes as two machine words, with its length in the last byte, so that
/// looking up a piece neither follows pointers nor loops over bytes. Equal keys mean equal pieces.
struct PieceKey {
    uint64_t low = 0, high = 0;
    bool operator==(const PieceKey&) const = default;

    static constexpr size_t longest = 15;

    /// Key of text[at, at + length), a piece of 1 to `longest` bytes.
    static PieceKey of(std::string_view text, size_t at, size_t length) {
        static_assert(std::endian::native == std::endian::little, "the first byte is the lowest");
        PieceKey key;
        if (text.size() - at >= sizeof key) {
            std::memcpy(&key, text.data() + at, sizeof key);
            key.low &= masks[length].low;
            key.high &= masks[length].high;
        } else {
            std::memcpy(&key, text.data() + at, length);
        }
        key.high |= uint64_t{length} << 56;
        return key;
    }

    /// The piece. Valid as long as the key.
    std::string_view view() const {
        return {reinterpret_cast<const char*>(this), static_cast<size_t>(high >> 56)};
    }

    uint64_t hash() const {
        __extension__ using Product = unsigned __int128;
        const Product product = Product{low ^ 0x9E3779B97F4A7C15u} * (high ^ 0xC2B2AE3D27D4EB4Fu);
        return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }

  private:
    struct Mask {
        uint64_t low, high;
    };
    static constexpr std::array<Mask, longest + 1> masks = [] {
        std::array<Mask, longest + 1> table{};
        for (size_t byte = 0; byte < longest; ++byte)
            for (size_t length = byte + 1; length <= longest; ++length)
                (byte < 8 ? table[length].low : table[length].high) |= uint64_t{0xFF}
                                                                       << (byte % 8 * 8);
        return table;
    }();
};

}  // namespace train_gpt
