#include "training/evaluations/python_random.h"

#include <numeric>
#include <sstream>

#include "base/error.h"
#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

std::vector<size_t> shuffled(uint64_t seed, size_t n) {
    std::vector<size_t> items(n);
    std::iota(items.begin(), items.end(), size_t{0});
    PythonRandom(seed).shuffle(items);
    return items;
}

std::string line_of(const std::vector<size_t>& numbers) {
    std::string line;
    for (const size_t number : numbers) line += concat(number, " ");
    return line + "\n";
}

}  // namespace

TEST_CASE("shuffles and samples are Python's: known ones", "[evaluations]") {
    // Computed by CPython 3.11.
    CHECK(shuffled(1337, 10) == std::vector<size_t>{0, 3, 7, 2, 1, 6, 4, 5, 8, 9});
    // Random(1241).sample of 0 … 2375 without 7
    std::vector<size_t> drawn = PythonRandom(1241).sample(2375, 10);
    for (size_t& number : drawn) number += number >= 7 ? 1 : 0;
    CHECK(drawn == std::vector<size_t>{2032, 867, 1155, 1037, 800, 2011, 2262, 868, 2157, 1162});
    CHECK(PythonRandom(1234).sample(20, 0).empty());
    CHECK(shuffled(3, 0).empty());
    CHECK(PythonRandom(5).sample(1, 1) == std::vector<size_t>{0});
}

TEST_CASE("shuffles and samples are those of the python3 on this machine, for any seed",
          "[evaluations]") {
    if (skip_without_python()) return;
    std::string script = "import random\ndef p(x): print(*x, '')\n", ours;
    for (int i = 0; i < 40; ++i) {
        // Seeds of one and two words, and sizes on both sides of sample's threshold.
        const uint64_t seed =
            random_int(0, 1) ? test_rng()() : static_cast<uint64_t>(random_int(0, 5000));
        const size_t n = static_cast<size_t>(random_int(1, random_int(0, 1) ? 40 : 3000));
        const size_t k = std::min(n, static_cast<size_t>(random_int(0, 40)));
        script += concat("r = random.Random(", seed, "); x = list(range(", n,
                         ")); r.shuffle(x); p(x); p(r.sample(range(", n, "), ", k, "))\n",
                         "p([r._randbelow(", uint64_t{1} << random_int(1, 63), ")])\n");
        PythonRandom random(seed);
        std::vector<size_t> items(n);
        std::iota(items.begin(), items.end(), size_t{0});
        random.shuffle(items);
        ours += line_of(items) + line_of(random.sample(n, k));
        const size_t limit_at = script.rfind("_randbelow(") + 11;
        ours += line_of({static_cast<size_t>(random.below(std::stoull(script.substr(limit_at))))});
    }
    const TemporaryDirectory directory;
    write(directory / "draw.py", script);
    const ProgramResult python = run_program({"python3", directory / "draw.py"});
    INFO(script);
    CHECK(python.exit_code == 0);
    CHECK(python.output == ours);
}
