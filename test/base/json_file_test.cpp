// Values of JSON files, by key.
#include "base/json_file.h"

#include <limits>

#include "test/catch.h"
#include "test/random.h"

using namespace train_gpt;

TEST_CASE("an integer in a JSON file is read only if the type can represent it") {
    const auto fits = [](const Json& value, auto zero) {
        try {
            return field<decltype(zero)>(Json{{"n", value}}, "n", "config.json") == value;
        } catch (const Error&) {
            return false;
        }
    };
    constexpr auto largest32 = std::numeric_limits<int>::max();
    constexpr auto largest64 = std::numeric_limits<int64_t>::max();
    CHECK(fits(random_int(-largest32, largest32), int{}));
    CHECK(fits(largest32, int{}));
    CHECK_FALSE(fits(random_int(int64_t{largest32} + 1, largest64), int{}));
    CHECK_FALSE(fits(random_int(-largest64, -int64_t{largest32} - 2), int{}));
    CHECK(fits(random_int(0, largest64), int64_t{}));
    CHECK_FALSE(fits(static_cast<uint64_t>(random_int(0, largest64)) + largest64 + 1, int64_t{}));
    CHECK(fits(static_cast<uint64_t>(random_int(0, largest64)) + largest64 + 1, uint64_t{}));
    CHECK_FALSE(fits(random_int(-largest64, -1), uint64_t{}));
    CHECK_FALSE(fits(2.5, int{}));
    CHECK_FALSE(fits(true, int{}));
    CHECK(fits(true, bool{}));
    CHECK_FALSE(fits(1, bool{}));
}
