#include "base/random.h"

#include <set>

#include "test/kernels/kernel_test.h"

namespace train_gpt {

TEST_CASE("philox gives the known answers that its authors publish") {
    CHECK(philox({0, 0}, {0, 0, 0, 0}) == uint32x4{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
    CHECK(philox({0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}) ==
          uint32x4{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
    CHECK(philox({0xa4093822, 0x299f31d0}, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}) ==
          uint32x4{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("every part of a random stream's name changes its numbers, high words too") {
    const uint64_t seed = test_rng()();
    std::set<uint32_t> first_words;
    for (const RandomStream& stream :
         {RandomStream(seed, RandomPurpose::init, 0, 0),
          RandomStream(seed + 1, RandomPurpose::init, 0, 0),
          RandomStream(seed ^ (uint64_t{1} << 63), RandomPurpose::init, 0, 0),
          RandomStream(seed, RandomPurpose::sampling, 0, 0),
          RandomStream(seed, RandomPurpose::init, 1, 0),
          RandomStream(seed, RandomPurpose::init, 0, 1),
          RandomStream(seed, RandomPurpose::init, 0, uint64_t{1} << 40)}) {
        first_words.insert(stream.bits(0));
        first_words.insert(stream.bits(uint64_t{1} << 40));
    }
    CHECK(first_words.size() == 14);
}

TEST_CASE("uniform and normal numbers have the moments of their distributions") {
    const RandomStream stream(test_rng()(), RandomPurpose::test, 3, 5);
    const int n = 200000;
    double uniform[3] = {}, normal[4] = {}, neighbours = 0;
    bool in_range = true;
    for (int i = 0; i < n; ++i) {
        const double u = static_cast<double>(stream.uniform(static_cast<uint64_t>(i)));
        const double z = static_cast<double>(stream.normal(static_cast<uint64_t>(i)));
        in_range = in_range && u >= 0 && u < 1;
        for (int power = 0; power < 3; ++power) uniform[power] += std::pow(u, power + 1) / n;
        for (int power = 0; power < 4; ++power) normal[power] += std::pow(z, power + 1) / n;
        neighbours += z * static_cast<double>(stream.normal(static_cast<uint64_t>(i) ^ 1)) / n;
    }
    CHECK(in_range);
    // Six standard errors of each estimate.
    const double error = 6 / std::sqrt(static_cast<double>(n));
    CHECK(std::abs(uniform[0] - 1.0 / 2) < error * std::sqrt(1.0 / 12));
    CHECK(std::abs(uniform[1] - 1.0 / 3) < error * std::sqrt(4.0 / 45));
    CHECK(std::abs(uniform[2] - 1.0 / 4) < error * std::sqrt(9.0 / 112));
    CHECK(std::abs(normal[0]) < error);
    CHECK(std::abs(normal[1] - 1) < error * std::sqrt(2.0));
    CHECK(std::abs(normal[2]) < error * std::sqrt(15.0));
    CHECK(std::abs(normal[3] - 3) < error * std::sqrt(96.0));
    CHECK(std::abs(neighbours) < error * std::sqrt(2.0));
}

TEST_CASE(
    "fill_normal writes the values that normal gives, from any start and with any number of "
    "threads") {
    const RandomStream stream(test_rng()(), RandomPurpose::init, 7, 0);
    const int64_t n = random_int(1, 500);
    const uint64_t first =
        static_cast<uint64_t>(random_int(0, 9)) + (random_int(0, 1) ? uint64_t{1} << 33 : 0);
    check_thread_independence([&] {
        const Buffer out(DType::fp32, {n + 1});
        stream.fill_normal(out.as<float>(), n, 0.02f, 1.5f, first);
        CHECK(std::isnan(out[static_cast<size_t>(n)]));
        bool equal = true;
        for (int64_t i = 0; i < n; ++i) {
            const float expected = 1.5f + 0.02f * stream.normal(first + static_cast<uint64_t>(i));
            equal =
                equal && std::abs(out.as<float>()[i] - expected) <= 0x1p-23f * std::abs(expected);
        }
        CHECK(equal);
        return out.bytes();
    });
}

}  // namespace train_gpt
