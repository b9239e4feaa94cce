#include "training/replay.h"

#include <string>

#include "test/catch.h"
#include "test/text.h"

using namespace train_gpt;

TEST_CASE("a replay says in which steps the first difference lies", "[replay]") {
    const auto pair = [](int64_t step) { return RunComparison::Pair{step, 1, 2}; };
    RunComparison found;
    found.steps = 20;
    found.columns = {{"loss", {}, {}}, {"gradient norm", {}, {}}};
    found.fingerprints = 4;
    const StepRange steps{20, 40};
    const auto first_line = [&] {
        const std::string text = describe_replay(found, steps);
        return text.substr(0, text.find('\n'));
    };
    CHECK(first_line() ==
          "steps 21 to 40 are the same (losses and norms of 20, fingerprints of 4)");
    found.only_a = 2;
    CHECK(contains(first_line(), "2 lines of the run's records could not be compared"));
    // Between two fingerprints
    found.state = {.after = 25, .step = 30, .what = {"m", "a", 0}};
    CHECK(first_line() == "first difference: m of a, in steps 26 to 30");
    // A number that differs earlier cuts the steps short, one that differs later does not.
    found.columns[0].first = pair(28);
    CHECK(first_line() == "first difference: loss, in steps 26 to 28");
    found.columns[0].first = pair(30);
    CHECK(first_line() == "first difference: m of a, in steps 26 to 30");
    // The checkpoint's step is equal.
    found.state->after = -1;
    CHECK(first_line() == "first difference: m of a, in steps 21 to 30");
    // Numbers alone, after the last equal fingerprint
    found.state = {};
    found.last_fingerprint = 35;
    found.columns[0].first = {};
    found.columns[1].first = pair(37);
    CHECK(first_line() == "first difference: gradient norm, in steps 36 to 37");
    found.columns[1].first = pair(33);  // fingerprints do not see an input
    CHECK(first_line() == "first difference: gradient norm, in step 33");
}
