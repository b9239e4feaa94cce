#include "kernels/neighbours.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "test/catch.h"
#include "test/random.h"

namespace train_gpt {

namespace {

/// The nearer of the two bf16 around a value, of two that are as near the even one; a NaN keeps its
/// upper bits and becomes quiet.
uint16_t nearest_bits(float value) {
    const auto word = std::bit_cast<uint32_t>(value);
    const auto towards_zero = static_cast<uint16_t>(word >> 16);
    if (std::isnan(value)) return static_cast<uint16_t>(towards_zero | 0x40u);
    const uint32_t rest = word & 0xffffu, half = 0x8000u;
    const bool away = rest > half || (rest == half && towards_zero % 2 == 1);
    return static_cast<uint16_t>(towards_zero + (away ? 1 : 0));
}

/// Any pattern of bits: numbers of all sizes, subnormal ones, infinities and NaNs, and many that
/// are between two bf16.
float any_float() {
    uint32_t word = static_cast<uint32_t>(test_rng()());
    if (random_int(0, 3) == 0) word &= 0x807fffffu;
    if (random_int(0, 3) == 0) word |= 0x7f800000u;
    if (random_int(0, 3) == 0) word = (word & 0xffff0000u) | 0x8000u;
    return std::bit_cast<float>(word);
}

std::vector<bf16> random_row(int64_t n) {
    std::vector<bf16> row;
    for (float x : random_normal(static_cast<size_t>(n))) row.emplace_back(x);
    return row;
}

}  // namespace

TEST_CASE(
    "neighbours of bf16 have the bits of the nearest numbers, and the rest of memory keeps its") {
    const int64_t n = random_int(0, 300), start = random_int(0, 1);
    std::vector<float> values;
    for (int64_t i = 0; i < n; ++i) values.push_back(any_float());
    const auto guard = static_cast<uint16_t>(random_int(0, 0xffff));
    std::vector<bf16> out(static_cast<size_t>(start + n + 2));
    for (bf16& element : out) element.bits = guard;

    const float* in = values.data();
    bf16* row = out.data() + start;
    for_positions<bf16>(n, [=](auto at) { at.store(row, at(in)); });
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; ++i) {
        const float value = values[static_cast<size_t>(i)];
        wrong += row[i].bits != nearest_bits(value);
        wrong += bf16(value).bits != nearest_bits(value);
    }
    CHECK(wrong == 0);
    CHECK((start == 0 || out[0].bits == guard));
    CHECK(row[n].bits == guard);
    CHECK(row[n + 1].bits == guard);

    std::vector<float> widened(static_cast<size_t>(n + 1), 7.0f);
    float* back = widened.data();
    const bf16* rounded = row;
    for_positions<bf16>(n, [=](auto at) { at.store(back, at(rounded)); });
    wrong = 0;
    for (int64_t i = 0; i < n; ++i)
        wrong += std::bit_cast<uint32_t>(back[i]) != uint32_t{row[i].bits} << 16;
    CHECK(wrong == 0);
    CHECK(back[n] == 7.0f);
}

TEST_CASE("neighbours are summed to the bits that single elements are summed to") {
    const int64_t n = random_int(0, 300), start = random_int(0, 1);
    const std::vector<bf16> xs = random_row(start + n), ws = random_row(start + n);
    const bf16 *x = xs.data() + start, *w = ws.data() + start;
    // A product of two bf16 is exact in fp32, so that fusing it with the addition changes nothing.
    const float single = lane_sum(n, [=](int64_t i) { return to_float(x[i]) * to_float(w[i]); });
    CHECK(position_sum<bf16>(n, [=](auto at) { return at(x) * at(w); }) == single);
}

TEST_CASE("a store returns what the row then holds") {
    const std::vector<float> values = random_normal(64);
    std::vector<bf16> row(values.size());
    std::vector<float> returned(values.size());
    const float* in = values.data();
    bf16* to = row.data();
    float* out = returned.data();
    for_positions<bf16>(static_cast<int64_t>(values.size()),
                        [=](auto at) { at.store(out, at.store(to, at(in))); });
    CHECK(std::equal(row.begin(), row.end(), returned.begin(),
                     [](bf16 held, float value) { return to_float(held) == value; }));
}

}  // namespace train_gpt
