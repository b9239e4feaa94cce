// Numbers in 8 bits: blocks of 256 with a scale each, and a dynamic map. Dettmers, Lewis, Shleifer
// & Zettlemoyer, "8-bit optimizers via block-wise quantization", arXiv 2110.02861.
//
//   value = scale · map[code]      scale: the largest absolute value of the block, in fp32
//
// A map has seven decades, of which each has twice as many values as the one below it, in the
// middle of equal intervals; 0; and 1, so that the largest value of a block is kept. A value
// becomes the code of the nearest value of the map; halfway between two it becomes the smaller one.
//
//   signs   1, 2, 4 … 64 values in the decades 10⁻⁷ … 1, and the same below 0. 1 takes the place of
//           the largest of them. Bit 7 of a code is the sign, and the others are the place among
//           the absolute values.
//   roots   2, 4, 8 … 128 values in the decades. The value is √v of a v ≥ 0. A positive one never
//           becomes 0: v is in the denominator of an update.
//
// A block whose largest absolute value is below 2⁻¹⁰⁰ becomes zeros, so that no product of a scale
// and a map's value is subnormal. Codes of the values of codes are the same codes and scales.
#pragma once
#include <bit>
#include <cstdint>
#include <limits>
#include <span>

namespace train_gpt {

/// How the numbers of an optimizer's slot are stored.
enum class Coding : uint8_t { none, signs, roots };

/// Elements with a common scale. They are consecutive in a tensor and begin at a multiple of it.
constexpr int64_t code_block = 256;
constexpr float smallest_scale = 0x1p-100f;
/// √v of the largest v in fp32.
constexpr float largest_root = 0x1.fffffep63f;

/// A map's absolute values, and what finds the nearest of them: the upper half of the bits of an
/// fp32 number in [lowest, 1] leads to a code, next to whose upper bound the number lies. Int:
/// uint8_t, or int32_t where processors gather.
template <Coding coding, class Int>
struct DynamicMap {
    static constexpr int count = coding == Coding::signs ? 128 : 256;
    static constexpr float lowest = 0x1p-22f;
    static constexpr uint32_t first_key = std::bit_cast<uint32_t>(lowest) >> 16;
    static constexpr int keys = (std::bit_cast<uint32_t>(1.0f) >> 16) - first_key + 1;

    float values[count] = {};  // of codes; ascending
    float bounds[count] = {};  // between a code's value and the next; the last one: infinity
    Int codes[keys] = {};      // as many bounds are below the numbers with this key

    constexpr DynamicMap() {
        double exact[count] = {};
        double top = 1e-6;
        int code = 1;
        for (int decade = 0; decade < 7; ++decade, top *= 10) {
            const int intervals = (coding == Coding::signs ? 1 : 2) << decade;
            for (int i = 0; i < intervals && code < count; ++i)
                exact[code++] = top * (0.1 + 0.9 * (i + 0.5) / intervals);
        }
        exact[count - 1] = 1;
        for (int c = 0; c < count; ++c) {
            values[c] = static_cast<float>(exact[c]);
            bounds[c] = c + 1 < count ? static_cast<float>((exact[c] + exact[c + 1]) / 2)
                                      : std::numeric_limits<float>::infinity();
        }
        if (coding == Coding::roots) bounds[0] = 0;
        for (int key = 0, below = 0; key < keys; ++key) {
            const float first =
                std::bit_cast<float>((first_key + static_cast<uint32_t>(key)) << 16);
            while (bounds[below] < first) ++below;
            codes[key] = static_cast<Int>(below);
        }
    }
};

/// One block: n ≤ code_block values become codes and a scale. With `roots`, values are √v.
template <Coding coding>
void encode_block(const float* values, int64_t n, uint8_t* codes, float& scale);
template <Coding coding>
void decode_block(const uint8_t* codes, float scale, int64_t n, float* values);

/// The same for any number of values, in the host's memory; scales [ceil(n / code_block)].
void encode(Coding coding, std::span<const float> values, uint8_t* codes, float* scales);
void decode(Coding coding, const uint8_t* codes, const float* scales, std::span<float> values);

}  // namespace train_gpt
