// The closing line "N passed, M failed", whatever ends the tests: of this program, and of scripts/run-tests.sh over several.
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

std::string last_line(const std::string& text) {
    const std::string lines = text.substr(0, text.find_last_not_of('\n') + 1);
    return lines.substr(lines.find_last_of('\n') + 1);
}

bool is_wanted() { return std::getenv("END_TESTS") != nullptr; }

/// Runs a script in place of the test program.
ProgramResult run_tests(const std::string& script, Environment environment = {}) {
    const TemporaryDirectory directory;
    const fs::path program = directory / "tests";
    write(program, "#!/bin/bash\n" + script);
    fs::permissions(program, fs::perms::owner_all);
    environment.insert({{"GPUSIM", ""}, {"SIMULATED", ""}, {"MEMCHECK", ""}});
    return run_program({"bash", "scripts/run-tests.sh", program}, environment);
}

}  // namespace

// Hidden cases, which pass when they are run by hand.
TEST_CASE("ends by abort", "[.][runner]") {
    if (is_wanted()) std::abort();
}
TEST_CASE("ends by a signal", "[.][runner]") {
    if (is_wanted()) std::raise(SIGSEGV);
}
TEST_CASE("ends by exit", "[.][runner]") {
    if (is_wanted()) std::exit(0);
}

TEST_CASE("the closing line comes whatever ends a test, which has failed then") {
    for (const char* name : {"ends by abort", "ends by a signal", "ends by exit"}) {
        const ProgramResult run = run_program({this_program(), name}, {{"END_TESTS", "1"}});
        INFO(run.output);
        CHECK(occurrences(run.output, "0 passed, 1 failed") == 1);
        CHECK(last_line(run.output) == "0 passed, 1 failed");
        CHECK(last_line(run_program({this_program(), name}).output) == "1 passed, 0 failed");
    }
}

TEST_CASE("run-tests.sh adds up, and an end without a count or a code is a failure") {
    const ProgramResult good = run_tests("echo noise; echo 7 passed, 0 failed");
    CHECK(good.exit_code == 0);
    CHECK(last_line(good.output) == "7 passed, 0 failed");
    // GPUSIM: the program runs twice.
    CHECK(last_line(run_tests("echo 7 passed, 2 failed; exit 2", {{"GPUSIM", "/"}}).output) ==
          "14 passed, 4 failed");
    for (const char* script : {"kill -9 $$", "exit 0", "echo 3 passed", "kill -ABRT $$"}) {
        const ProgramResult run = run_tests(script);
        INFO(script << ": " << run.output);
        CHECK(run.exit_code != 0);
        CHECK(last_line(run.output) == "0 passed, 1 failed");
    }
    const ProgramResult late = run_tests("echo 7 passed, 0 failed; kill -SEGV $$");
    CHECK(late.exit_code != 0);
    CHECK(last_line(late.output) == "7 passed, 1 failed");
}
