// What a supervisor and its agents on the hosts say to each other.
#include "training/supervise/host_agent.h"

#include <algorithm>
#include <string>
#include <vector>

#include <unistd.h>

#include "base/child_process.h"
#include "base/printable.h"
#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"
#include "training/supervise/line_reader.h"
#include "training/supervise/ranks_on_hosts.h"

using namespace train_gpt;

namespace {

/// Printable text with characters that shells and JSON treat in their own way.
std::string odd_text() {
    const std::string characters = "ab \"'\\$`!*?;&|<>(){}[]#~=%\t-";
    std::string text;
    for (int64_t n = random_int(0, 20); n > 0; --n)
        text += characters[static_cast<size_t>(random_int(0, std::ssize(characters) - 1))];
    return text;
}

}  // namespace

TEST_CASE("lines come whole, however their bytes arrive", "[host_agent]") {
    for (int round = 0; round < 50; ++round) {
        std::string text;
        std::vector<std::string> expected;
        for (int64_t n = random_int(0, 30); n > 0; --n) {
            expected.emplace_back(static_cast<size_t>(random_int(0, 300)), 'x');
            text += expected.back() + "\n";
        }
        if (random_int(0, 1)) text += expected.emplace_back("a last line without its end");
        const Pipe pipe = open_pipe();
        LineReader reader(pipe.reads);
        std::vector<std::string> lines;
        const auto take = [&] {
            for (const std::string& line : reader.take()) lines.push_back(line);
        };
        for (size_t at = 0; at < text.size();) {
            const size_t n = std::min(text.size() - at, static_cast<size_t>(random_int(1, 500)));
            REQUIRE(::write(pipe.writes, text.data() + at, n) == static_cast<ssize_t>(n));
            at += n;
            take();
        }
        CHECK_FALSE(reader.is_at_end());
        ::close(pipe.writes);
        take();
        CHECK(reader.is_at_end());
        CHECK(lines == expected);
    }
}

TEST_CASE("an order arrives as it was given", "[host_agent]") {
    for (int round = 0; round < 50; ++round) {
        AgentOrder order{.directory = odd_text(),
                         .arguments = {"train", odd_text(), odd_text()},
                         .variables = {"A=" + odd_text()},
                         .first = static_cast<int>(random_int(0, 500)),
                         .count = static_cast<int>(random_int(1, 8)),
                         .mark = odd_text(),
                         .mark_missing = odd_text()};
        const std::string packed = order.packed();
        CHECK_FALSE(contains(packed, "\n"));
        const AgentOrder parsed = AgentOrder::parse(packed);
        CHECK(parsed.directory == order.directory);
        CHECK(parsed.arguments == order.arguments);
        CHECK(parsed.variables == order.variables);
        CHECK(parsed.first == order.first);
        CHECK(parsed.count == order.count);
        CHECK(parsed.mark == order.mark);
        CHECK(parsed.mark_missing == order.mark_missing);
    }
    for (const char* text : {"", "{}", "[1]", R"({"directory": 1})", "stop"})
        CHECK(contains(error_of([&] { AgentOrder::parse(text); }), "is not an order"));
}

TEST_CASE("a shell reads a word as it was given", "[host_agent]") {
    for (int round = 0; round < 20; ++round) {
        const std::string word = odd_text();
        CHECK(run_program({"sh", "-c", "printf %s " + shell_word(word)}).output == word);
    }
}

TEST_CASE("a host that cannot be reached, and one that does not answer in time, have no ends",
          "[host_agent]") {
    const auto ends_of = [](const std::string& command, double seconds) {
        return run_on_hosts(
                   Reach(Reach::Way::ssh, command),
                   {{.host = "a", .order = {.directory = "/", .arguments = {"--version"}}}},
                   {.answer_seconds = seconds}, [](const RankLine&) {}, [] { return false; })
            .at(0);
    };
    for (const char* command : {"false", "no-such-program", "sh -c exit"}) {
        const HostEnd end = ends_of(command, 60);
        CHECK_FALSE(end.has_answered);
        CHECK_FALSE(end.all_succeeded());
        CHECK(end.ranks == std::vector<RankEnd>{std::nullopt});
    }
    CHECK_FALSE(ends_of("sleep 1000", 0.2).all_succeeded());
}
