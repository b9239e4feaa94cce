// What a terminal and `ps` show.
#include "test/commands/terminal.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/text_table.h"
#include "test/commands/program.h"

using namespace train_gpt;

namespace {

constexpr const char* attack =
    "\x1b]0;owned\x07\xc2\x9b"
    "31m\xff";

void check_printable(const Outcome& outcome) {
    CAPTURE(outcome.out, outcome.err);
    CHECK(outcome.code != 0);
    for (const std::string& text : {outcome.out, outcome.err}) {
        CHECK(std::none_of(text.begin(), text.end(), [](char c) {
            return (static_cast<unsigned char>(c) < 0x20 && c != '\n') || c == '\xff' ||
                   c == '\x7f';
        }));
        CHECK_FALSE(contains(text, "\xc2\x9b"));
    }
    CHECK(contains(outcome.err, "\\u001b"));
}

/// What the program prints when its output is a terminal.
std::string on_terminal(const Arguments& arguments) {
    const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    REQUIRE(terminal >= 0);
    REQUIRE((::grantpt(terminal) == 0 && ::unlockpt(terminal) == 0));
    const std::string program = binary(), side = ::ptsname(terminal);
    std::vector<char*> argv{const_cast<char*>(program.c_str())};
    for (const std::string& argument : arguments)
        argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    const pid_t pid = ::fork();
    if (pid == 0) {
        ::dup2(::open(side.c_str(), O_RDWR | O_NOCTTY), STDOUT_FILENO);
        ::execv(program.c_str(), argv.data());
        ::_exit(127);
    }
    std::string text;
    char piece[4096];
    for (ssize_t n; (n = ::read(terminal, piece, sizeof piece)) > 0;)
        text.append(piece, static_cast<size_t>(n));  // EIO when the program has ended
    int status = 0;
    ::waitpid(pid, &status, 0);
    ::close(terminal);
    CHECK(status == 0);
    return text;
}

}  // namespace

TEST_CASE("the process has its program's name, also after a rename", "[cli]") {
    // This program has set the variable for itself; if the program inherited it, it would not
    // restart itself.
    const char* spins = std::getenv("GOMP_SPINCOUNT");
    const std::string before = spins ? spins : "";
    ::unsetenv("GOMP_SPINCOUNT");
    const TemporaryDirectory directory;
    const auto name_of_process = [&](const std::string& program) {
        const std::string run = directory / ("run-" + fs::path(program).filename().string());
        Process process(Workplace::get().train(run, endless), {.program = program});
        REQUIRE(process.wait_for_step(1));
        return read("/proc/" + std::to_string(process.pid()) + "/comm");
    };
    CHECK(name_of_process(binary()) == fs::path(binary()).filename().string() + "\n");
    fs::copy_file(binary(), directory / "my_model");
    CHECK(name_of_process(directory / "my_model") == "my_model\n");
    if (spins) ::setenv("GOMP_SPINCOUNT", before.c_str(), 1);
}

TEST_CASE("control characters and bad UTF-8 from files and arguments are escaped", "[cli]") {
    const TemporaryDirectory directory;
    const std::string model = directory / "model", config = model + "/config.json";
    fs::copy(finished_run() + "/" + step_folder(12), model);
    fs::remove(model + "/manifest.json");
    SortedJson json = SortedJson::parse(read(config));
    json["activation_function"] = "\x1b]0;owned\x07";
    write(config, json.dump());
    for (const char* command : {"eval", "sample"})
        check_printable(train_gpt_with({command, model}));
    check_printable(train_gpt_with({"plan", directory / attack}));
    check_printable(train_gpt_with({"verify", directory / attack}));
    check_printable(train_gpt_with({"config", std::string("--") + attack}));
    check_printable(train_gpt_with({attack}));
    check_printable(train_gpt_with(
        Workplace::get().train(directory / "run", {"--set", std::string(attack) + "=1"})));
    check_printable(train_gpt_with(
        Workplace::get().train(directory / "run", {"--set", std::string("seed=") + attack})));
    write(directory / "key.json", SortedJson{{"\x1b]0;owned\x07", 1}}.dump());
    check_printable(train_gpt_with({"plan", directory / "key.json"}));
    write(directory / (std::string(attack) + ".json"), "{");
    check_printable(train_gpt_with({"plan", directory / (std::string(attack) + ".json")}));
    // A newline in a name does not begin a second line.
    check_refused(train_gpt_with({"plan", directory / "two\nlines"}), 1, {"two\\nlines"});
}

TEST_CASE("a sample goes raw to a file, and escaped to a terminal", "[cli]") {
    const Arguments sample{"sample",        finished_run(), "--prompt",
                           "a\x1b[31m\xff", "--max-tokens", "5"};
    CHECK(check_succeeds(train_gpt_with(sample)).out.starts_with("a\x1b[31m\xff"));
    if (skip_without_terminals()) return;
    CHECK(contains(on_terminal(sample), "a\\u001b[31m\\xff"));
}

TEST_CASE("a checkpoint's hashes are compared before anything in it is read", "[cli]") {
    const TemporaryDirectory directory;
    const std::string checkpoint = directory / "checkpoint";
    fs::copy(finished_run() + "/" + step_folder(12), checkpoint);
    for (const char* text : {"", "{\n  \"n_layer\": ", "\x1b not JSON", "[]"}) {
        write(checkpoint + "/config.json", text);
        for (const char* command : {"eval", "sample"}) {
            const Outcome outcome = train_gpt_with({command, checkpoint});
            check_refused(outcome, 1, {checkpoint + "/config.json", "damaged", "restore"});
            CHECK_FALSE(contains(outcome.err, "exception"));
        }
    }
    // Without hashes, as in a model from another program, the position of the error is named.
    fs::remove(checkpoint + "/manifest.json");
    write(checkpoint + "/config.json", "{\n  \"n_layer\": }");
    for (const char* command : {"eval", "sample"}) {
        const Outcome outcome = train_gpt_with({command, checkpoint});
        check_refused(outcome, 1, {checkpoint + "/config.json", "line 2, column 14"});
        CHECK_FALSE(contains(outcome.err, "exception"));
    }
}

TEST_CASE("a terminal gets messages broken at words, and commands on lines of their own", "[cli]") {
    if (skip_without_terminals()) return;
    const auto shown = [](const Arguments& arguments) {
        TerminalProcess process(arguments, 60);
        process.finish();
        return process.screen();
    };
    const auto is_broken = [](const std::string& text, const std::string& screen) {
        std::istringstream lines(screen);
        for (std::string line; std::getline(lines, line);)
            if (width_of(line) > 59 && line.find(' ', line.find_first_not_of(' ')) != line.npos &&
                !line.starts_with("    "))
                return false;
        std::string a = text, b = screen;
        // Around a command that moves to a line of its own, punctuation may go.
        for (std::string* all : {&a, &b})
            std::erase_if(*all, [](char c) { return std::strchr(" \n`;,.", c) != nullptr; });
        return a == b;
    };
    const TemporaryDirectory directory;
    for (const Arguments& arguments :
         {Arguments{"--help"}, Arguments{"train", "--help"},
          Arguments{"config", "--schema", "--depth", "x"}, Arguments{"report", directory.path()},
          Arguments{"eval", finished_run(), "--device", "cpu"},
          Arguments{"verify", finished_run(), "--without-data"},
          Arguments{"train", Workplace::get().config(), "--set",
                    "data.train=" + directory.path()}}) {
        const Outcome piped = train_gpt_with(arguments);
        const std::string screen = shown(arguments);
        INFO("piped:\n" << piped.out << piped.err << "on a terminal:\n" << screen);
        CHECK(is_broken(piped.out + piped.err, screen));
    }
    // Scripts and JSON stay as they are.
    for (const Arguments& arguments :
         {Arguments{"completion", "bash"}, Arguments{"--man"}, Arguments{"config", "--schema"}})
        CHECK(shown(arguments) == check_succeeds(train_gpt_with(arguments)).out);

    CHECK(contains(shown({"report", "A", "--tolerance", "0"}),
                   "and 1 is named:\n    train_gpt report A B --tolerance 0\n"));
}

TEST_CASE("a run of one rank says nothing about communication", "[cli]") {
    const TemporaryDirectory directory;
    const Outcome run = check_succeeds(
        train_gpt_with(Workplace::get().train(directory / "alone", {"--set", "schedule.steps=4"})));
    CHECK(contains(run.out, "time of a step: compute"));
    CHECK_FALSE(contains(run.out + run.err, "communication"));
}
