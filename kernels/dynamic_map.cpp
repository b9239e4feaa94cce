#include "kernels/dynamic_map.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "kernels/lanes.h"

namespace train_gpt {

namespace {

template <Coding coding>
constexpr DynamicMap<coding, int32_t> map_of = {};

}  // namespace

template <Coding coding>
void encode_block(const float* values, int64_t n, uint8_t* codes, float& scale) {
    constexpr const DynamicMap<coding, int32_t>& map = map_of<coding>;
    const float largest = lane_max(n, [=](int64_t i) { return std::abs(values[i]); });
    if (!(largest >= smallest_scale)) {
        scale = 0;
        std::fill_n(codes, n, uint8_t{0});
        return;
    }
    scale = largest;
    const float inverse = 1 / largest;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        float x = std::abs(values[i]) * inverse;
        x = x < 1.0f ? x : 1.0f;
        x = x > map.lowest ? x : map.lowest;
        const int32_t below =
            map.codes[static_cast<int32_t>((std::bit_cast<uint32_t>(x) >> 16) - map.first_key)];
        const int32_t code = below + (x > map.bounds[below] ? 1 : 0);
        const int32_t sign = coding == Coding::signs && values[i] < 0 && code > 0 ? 0x80 : 0;
        const bool is_zero = coding == Coding::roots && !(values[i] > 0);
        codes[i] = static_cast<uint8_t>(is_zero ? 0 : code | sign);
    }
}

template <Coding coding>
void decode_block(const uint8_t* codes, float scale, int64_t n, float* values) {
    constexpr const DynamicMap<coding, int32_t>& map = map_of<coding>;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const int32_t code = codes[i], place = coding == Coding::signs ? code & 0x7f : code;
        const float value = map.values[place] * scale;
        values[i] = coding == Coding::signs && code > 0x7f ? -value : value;
    }
}

template void encode_block<Coding::signs>(const float*, int64_t, uint8_t*, float&);
template void encode_block<Coding::roots>(const float*, int64_t, uint8_t*, float&);
template void decode_block<Coding::signs>(const uint8_t*, float, int64_t, float*);
template void decode_block<Coding::roots>(const uint8_t*, float, int64_t, float*);

void encode(Coding coding, std::span<const float> values, uint8_t* codes, float* scales) {
    const auto n = std::ssize(values);
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < n; first += code_block) {
        const auto block =
            coding == Coding::signs ? &encode_block<Coding::signs> : &encode_block<Coding::roots>;
        block(values.data() + first, std::min(code_block, n - first), codes + first,
              scales[first / code_block]);
    }
}

void decode(Coding coding, const uint8_t* codes, const float* scales, std::span<float> values) {
    const auto n = std::ssize(values);
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < n; first += code_block) {
        const auto block =
            coding == Coding::signs ? &decode_block<Coding::signs> : &decode_block<Coding::roots>;
        block(codes + first, scales[first / code_block], std::min(code_block, n - first),
              values.data() + first);
    }
}

}  // namespace train_gpt
