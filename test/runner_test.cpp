// The closing line "N passed, M failed" is printed however the tests end: by this program, and by
// scripts/run-tests.sh for several runs.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "test/catch.h"
#include "test/kernels/kernel_test.h"
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

/// Runs scripts/run-tests.sh with a script in place of the test program, as on a machine without a
/// GPU.
ProgramResult run_tests(const std::string& script, const std::vector<std::string>& arguments,
                        Environment environment = {}) {
    const TemporaryDirectory directory;
    const auto tool = [&](const char* name, const std::string& text) {
        write(directory / name, "#!/bin/bash\n" + text);
        fs::permissions(directory / name, fs::perms::owner_all);
        return directory / name;
    };
    tool("nvidia-smi", "exit 9");
    std::vector<std::string> command{"bash", "scripts/run-tests.sh", tool("tests", script)};
    command.insert(command.end(), arguments.begin(), arguments.end());
    environment.insert({{"PATH", directory.path() + ":" + std::getenv("PATH")},
                        {"GPUSIM", ""},
                        {"SIMULATED", ""},
                        {"MEMCHECK", ""}});
    return run_program(command, environment);
}

std::vector<std::string> lines_of(const std::string& text) {
    std::istringstream in(text);
    std::vector<std::string> lines;
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

}  // namespace

// Hidden cases, which pass when they are run by hand.
TEST_CASE("ends by abort", "[.][runner]") {
    if (is_wanted()) std::abort();
}
TEST_CASE("ends by a signal", "[.][runner]") {
    if (is_wanted()) std::raise(SIGSEGV);
}
TEST_CASE("waits for a program", "[.][runner]") {
    if (is_wanted()) run_program({"bash", "-c", std::getenv("PROGRAM")});
}
TEST_CASE("ends by exit", "[.][runner]") {
    if (is_wanted()) std::exit(0);
}

TEST_CASE("fails when its accuracy is judged", "[.][runner]") {
    Accuracy accuracy;
    if (is_wanted()) accuracy.check("one value", DType::fp32, {1}, {0}, {0});
}

TEST_CASE("with -a, a check that fails at the end of a test ends the tests with their count") {
    const char* name = "fails when its accuracy is judged";
    const ProgramResult run = run_program({this_program(), name, "-a"}, {{"END_TESTS", "1"}});
    INFO(run.output);
    CHECK(last_line(run.output) == "0 passed, 1 failed");
    CHECK(run.exit_code > 0);
    CHECK(run.exit_code < 128);  // no signal
    CHECK(last_line(run_program({this_program(), name, "-a"}).output) == "1 passed, 0 failed");
}

TEST_CASE("test cases for ranks pass when they are started alone") {
    const ProgramResult run = run_program({this_program(), "ranks: *"});
    INFO(run.output);
    CHECK(run.exit_code == 0);
    CHECK(std::regex_match(last_line(run.output), std::regex("[1-9][0-9]* passed, 0 failed")));
}

TEST_CASE("the closing line is printed whatever ends a test, and that test counts as failed") {
    for (const char* name : {"ends by abort", "ends by a signal", "ends by exit"}) {
        const ProgramResult run = run_program({this_program(), name}, {{"END_TESTS", "1"}});
        INFO(run.output);
        CHECK(occurrences(run.output, "0 passed, 1 failed") == 1);
        CHECK(last_line(run.output) == "0 passed, 1 failed");
        CHECK(last_line(run_program({this_program(), name}).output) == "1 passed, 0 failed");
    }
}

TEST_CASE("what failed, where and why is repeated at the end") {
    const std::string name = "fails when its accuracy is judged";
    const ProgramResult run = run_program({this_program(), name}, {{"END_TESTS", "1"}});
    INFO(run.output);
    const std::vector<std::string> lines = lines_of(run.output);
    REQUIRE(lines.size() > 1);
    const std::string& failure = lines[lines.size() - 2];
    CHECK(std::regex_match(failure, std::regex("failed: " + name + ": .*\\.(h|cpp):[0-9]+: .* " +
                                               "\\(TEST_SEED=[0-9]+\\)")));

    const ProgramResult both = run_tests(
        "echo 'failed: one: x.cpp:7: 1 == 2 (TEST_SEED=3)'; echo noise;"
        "echo 1 passed, 1 failed; exit 1",
        {"[x]"}, {{"GPUSIM", "/"}});
    const std::vector<std::string> end = lines_of(both.output);
    REQUIRE(end.size() > 3);
    for (size_t i = end.size() - 3; i + 1 < end.size(); ++i)
        CHECK(end[i] == "failed: one: x.cpp:7: 1 == 2 (TEST_SEED=3)");
}

TEST_CASE("run-tests.sh adds up, and an end without a count or a code is a failure") {
    const ProgramResult good = run_tests("echo noise; echo 7 passed, 0 failed", {"[x]"});
    CHECK(good.exit_code == 0);
    CHECK(last_line(good.output) == "7 passed, 0 failed");
    // GPUSIM: the program runs twice.
    CHECK(last_line(
              run_tests("echo 7 passed, 2 failed; exit 2", {"[x]"}, {{"GPUSIM", "/"}}).output) ==
          "14 passed, 4 failed");
    for (const char* script : {"kill -9 $$", "exit 0", "echo 3 passed", "kill -ABRT $$"}) {
        const ProgramResult run = run_tests(script, {"[x]"});
        INFO(script << ": " << run.output);
        CHECK(run.exit_code != 0);
        CHECK(last_line(run.output) == "0 passed, 1 failed");
    }
    const ProgramResult late = run_tests("echo 7 passed, 0 failed; kill -SEGV $$", {"[x]"});
    CHECK(late.exit_code != 0);
    CHECK(last_line(late.output) == "7 passed, 1 failed");
}

TEST_CASE("only the last line of run-tests.sh looks like the end") {
    for (const std::vector<std::string>& arguments : {std::vector<std::string>{}, {"[x]"}}) {
        const ProgramResult run =
            run_tests("echo 5 passed, 2 failed; exit 2", arguments, {{"GPUSIM", "/"}});
        INFO(run.output);
        const std::regex end("[0-9]+ passed, [0-9]+ failed");
        const std::vector<std::string> lines = lines_of(run.output);
        CHECK(std::ranges::count_if(lines, [&](const std::string& line) {
                  return std::regex_match(line, end);
              }) == 1);
        CHECK(std::regex_match(lines.back(), end));
        CHECK(contains(run.output, "part: 5 cases passed and 2 failed"));
    }
}

TEST_CASE("run-tests.sh says how many test cases have ended while they run") {
    const std::string script = "printf .. >> \"$TEST_PROGRESS\"; sleep 2; echo 2 passed, 0 failed";
    const ProgramResult run = run_tests(script, {"[x]"}, {{"PROGRESS_SECONDS", "0.3"}});
    INFO(run.output);
    CHECK(contains(run.output, " s: 2 test cases have ended\n"));
    CHECK(last_line(run.output) == "2 passed, 0 failed");

    // The program counts its own cases, without cases of the processes that it starts.
    const TemporaryDirectory directory;
    write(directory / "progress", "");
    const ProgramResult cases = run_program(
        {this_program(), "ends by abort,what failed\\, where and why is repeated at the end"},
        {{"TEST_PROGRESS", directory / "progress"}});
    INFO(cases.output);
    CHECK(read(directory / "progress").size() == 2);
}

TEST_CASE("Ctrl-C or SIGTERM ends run-tests.sh and all that it started") {
    const auto lives = [](const std::string& process) {
        // Empty for a process that has ended and for which nobody has waited.
        const std::string file = "/proc/" + process + "/cmdline";
        return fs::exists(file) && !read(file).empty();
    };
    // The last of the programs for which tests wait sends the signal.
    const std::string tests =
        "echo $$ >> \"$PROCESSES\"\n"
        "SCRIPT=$PPID exec \"$TESTS\" 'waits for a program'\n";
    const std::string program =
        "echo $$ >> \"$PROCESSES\"\n"
        "[ $(wc -l < \"$PROCESSES\") -lt $WANTED ] || { sleep 1; kill $SIGNAL$SCRIPT; } &\n"
        "exec sleep 600\n";
    struct Signal {
        const char* arguments;
        int exit_code;
    };
    for (const Signal& signal : {Signal{"-INT -- -", 130}, Signal{"-TERM ", 143}})
        for (const std::vector<std::string>& arguments : {std::vector<std::string>{}, {"[x]"}}) {
            const TemporaryDirectory directory;
            fs::create_directory(directory / "tmp");
            const size_t wanted = arguments.empty() ? 8 : 2;
            const ProgramResult run = run_tests(tests, arguments,
                                                {{"PROCESSES", directory / "processes"},
                                                 {"WANTED", std::to_string(wanted)},
                                                 {"SIGNAL", signal.arguments},
                                                 {"TESTS", this_program()},
                                                 {"PROGRAM", program},
                                                 {"END_TESTS", "1"},
                                                 {"TMPDIR", directory / "tmp"}});
            CAPTURE(signal.arguments, wanted, run.output);
            CHECK(run.exit_code == signal.exit_code);
            CHECK(run.seconds < 600);
            const std::vector<std::string> processes = lines_of(read(directory / "processes"));
            CHECK(processes.size() == wanted);
            for (int i = 0; i < 100 && std::ranges::any_of(processes, lives); ++i)
                std::this_thread::sleep_for(std::chrono::milliseconds(100));
            CHECK(std::ranges::none_of(processes, lives));
            CHECK(fs::is_empty(directory / "tmp"));
        }
}

TEST_CASE("run-tests.sh runs every case once, though some at the same time") {
    const TemporaryDirectory directory;
    const std::string calls = directory / "calls";
    const ProgramResult run =
        run_tests("echo \"$*\" >> \"$CALLS\"; echo 5 passed, 0 failed", {}, {{"CALLS", calls}});
    CHECK(run.exit_code == 0);
    const std::vector<std::string> parts = lines_of(read(calls));
    CHECK(last_line(run.output) == std::to_string(5 * parts.size()) + " passed, 0 failed");

    const auto names = [](const std::string& tags) {
        return lines_of(
            run_program({this_program(), "--list-test-names-only", tags}, {{"TEST_SEED", "1"}})
                .output);
    };
    std::multiset<std::string> in_parts;
    const std::vector<std::string> all = names("~[.]"), none = names("[no such tag]");
    for (const std::string& part : parts)
        for (const std::string& name : names(part))
            if (std::ranges::find(none, name) == none.end()) in_parts.insert(name);
    std::multiset<std::string> expected(all.begin(), all.end());
    for (const std::string& line : none) expected.erase(line);
    CHECK(in_parts == expected);
}
