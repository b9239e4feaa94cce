// The table of `--profile`.
#include "training/watch/step_profile.h"

#include <regex>
#include <string>

#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"

using namespace train_gpt;

TEST_CASE("a profile's table divides by the steps that were computed, also those computed again",
          "[training]") {
    for (int round = 0; round < 20; ++round) {
        const int64_t steps = random_int(1, 20), repeats = round == 0 ? 0 : random_int(0, 9),
                      calls = random_int(1, 9), computed = steps + repeats;
        const double ms = 1e-3 * static_cast<double>(random_int(1000, 9999));
        CAPTURE(steps, repeats, calls, ms);
        Profiler::Total total;
        total.kind = "gelu_forward";
        total.calls = calls * computed;
        total.seconds = 1e-3 * ms * static_cast<double>(computed);
        total.bytes = 2e9 * total.seconds;
        const std::string table =
            profile_table({total}, steps, repeats, 2 * total.seconds, 1e12, 8e9);
        std::string title = concat("profile of ", steps, " steps");
        if (repeats > 0) title += concat(" and of ", repeats, " that were computed again");
        CHECK(table.starts_with(title + "; limits measured here: 8.0 GB/s, 1.00 TFLOP/s\n"));
        std::smatch row;
        REQUIRE(std::regex_search(
            table, row,
            std::regex("\n  gelu_forward +([0-9.]+) +([0-9.]+) +50.0% +2.0 GB/s +25.0%\n")));
        CHECK(row[1] == concat(calls, ".0"));
        CHECK(std::abs(std::stod(row[2]) - ms) < 1e-3);
        REQUIRE(std::regex_search(table, row, std::regex("\n  step +([0-9.]+)$")));
        CHECK(std::abs(std::stod(row[1]) - 2 * ms) < 1e-3);
    }
}
