// train_gpt selfcheck.

#include "test/commands/program.h"

using namespace train_gpt;

TEST_CASE("selfcheck of one rank prints what its device reaches and finds nothing wrong", "[cli]") {
    const Outcome outcome =
        check_succeeds(train_gpt_with({"selfcheck", "--device", "cpu", "--tolerance", "0"}));
    for (const char* part :
         {"rank", "bf16 TFLOP/s", "fp32 TFLOP/s", "memory GB/s", "1 thread", "nothing to compare"})
        CHECK(contains(outcome.out, part));
    CHECK_FALSE(contains(outcome.out, "GPU GB/s"));
    CHECK_FALSE(contains(outcome.out, "collectives"));
}

TEST_CASE("selfcheck of two ranks compares them and measures collectives by size", "[cli]") {
    const Arguments command{binary(),      "selfcheck", "--device",   "cpu",
                            "--max-bytes", "300000",    "--tolerance"};
    const ProgramResult alike = run_ranks(2, command + Arguments{"100"});
    INFO(alike.output);
    CHECK(alike.exit_code == 0);
    for (const char* part : {"\n   0  ", "\n   1  ", "median", "over 2 ranks", "64 KiB", "256 KiB",
                             "no rank is more than 100% below"})
        CHECK(contains(alike.output, part));
    CHECK_FALSE(contains(alike.output, "1 MiB"));
    CHECK_FALSE(contains(alike.output, "measured again"));
}

TEST_CASE("selfcheck measures collectives along each axis of a mesh", "[cli]") {
    if (skip_without_mpirun()) return;
    const ProgramResult result =
        run_ranks(4, {binary(), "selfcheck", "--device", "cpu", "--max-bytes", "65536",
                      "--tolerance", "100", "--tensor", "2"});
    INFO(result.output);
    CHECK(result.exit_code == 0);
    for (const char* part :
         {"collectives over 4 ranks", "collectives along data, over 2 ranks in each of 2",
          "collectives along tensor, over 2 ranks in each of 2"})
        CHECK(contains(result.output, part));
    CHECK_FALSE(contains(result.output, "along shard"));
}

TEST_CASE("selfcheck measures again where a rank looks slow, and names each slow one once",
          "[cli]") {
    // No two measurements are equal, so one of two ranks is slower than tolerance 0 allows. Which
    // one that is, and whether it is slow again, depends on the machine.
    const ProgramResult result = run_ranks(
        2, {binary(), "selfcheck", "--device", "cpu", "--max-bytes", "65536", "--tolerance", "0"});
    INFO(result.output);
    CHECK(contains(result.output, "measured again, since a rank looked slow"));
    size_t named = 0;
    for (const char* rank : {"\nrank 0 (", "\nrank 1 ("}) {
        const size_t lines = occurrences(result.output, rank);
        CHECK(lines <= 1);
        named += lines;
    }
    CHECK((result.exit_code > 0) == (named > 0));
    CHECK(contains(result.output, "no rank was more than 0% below") == (named == 0));
    if (named > 0)
        CHECK(contains(result.output, "train_gpt: " + std::to_string(named) + " of 2 ranks w"));
    CHECK_FALSE(contains(result.output, "% above"));
}

TEST_CASE("selfcheck of two GPUs measures their copies and NCCL too", "[cli][cuda]") {
    if (!contains(check_succeeds(train_gpt_with({"--version"})).out, "GPU 1")) return;
    const ProgramResult result = run_ranks(2, {binary(), "selfcheck", "--device", "cuda",
                                               "--max-bytes", "65536", "--tolerance", "100"});
    INFO(result.output);
    CHECK(result.exit_code == 0);
    for (const char* part :
         {"to GPU GB/s", "from GPU GB/s", "over 2 ranks", "64 KiB", "no rank is more than 100%"})
        CHECK(contains(result.output, part));
}
