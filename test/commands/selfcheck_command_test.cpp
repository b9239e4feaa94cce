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
    if (skip_without_mpirun()) return;
    const Arguments command{binary(),      "selfcheck", "--device",   "cpu",
                            "--max-bytes", "300000",    "--tolerance"};
    const ProgramResult alike = run_ranks(2, command + Arguments{"1000"});
    INFO(alike.output);
    CHECK(alike.exit_code == 0);
    for (const char* part :
         {"\n   0  ", "\n   1  ", "median", "over 2 ranks", "64 KiB", "256 KiB", "within 1000%"})
        CHECK(contains(alike.output, part));
    CHECK_FALSE(contains(alike.output, "1 MiB"));

    // No two measurements are equal.
    const ProgramResult different = run_ranks(2, command + Arguments{"0"});
    INFO(different.output);
    CHECK(different.exit_code > 0);
    CHECK(contains(different.output, "\nrank 0 ("));
    CHECK(contains(different.output, "\nrank 1 ("));
    CHECK(contains(different.output, "train_gpt: 2 of 2 ranks are more than 0% off"));
}

TEST_CASE("selfcheck of two GPUs measures their copies and NCCL too", "[cli][cuda]") {
    if (!contains(check_succeeds(train_gpt_with({"--version"})).out, "GPU 1") ||
        skip_without_mpirun())
        return;
    const ProgramResult result = run_ranks(2, {binary(), "selfcheck", "--device", "cuda",
                                               "--max-bytes", "65536", "--tolerance", "1000"});
    INFO(result.output);
    CHECK(result.exit_code == 0);
    for (const char* part :
         {"to GPU GB/s", "from GPU GB/s", "over 2 ranks", "64 KiB", "within 1000%"})
        CHECK(contains(result.output, part));
}
