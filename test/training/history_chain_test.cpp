#include "training/files/history_chain.h"

#include <string>
#include <utility>
#include <vector>

#include "base/sha256.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

std::string random_text() {
    std::string text;
    for (int64_t n = random_int(0, 30); n > 0; --n)
        text += std::string(1, static_cast<char>(random_int(1, 127)));
    return text;
}

/// The lines of a history that a writer has written, each with its end.
std::vector<std::string> random_history(const std::string& folder, int64_t count) {
    {
        HistoryWriter writer(folder);
        for (int64_t i = 0; i < count; ++i) {
            Json event = history_event("sample", i);
            event["text"] = random_text();
            writer.append(std::move(event));
        }
    }
    std::vector<std::string> lines;
    const std::string text = read(folder + "/history.jsonl");
    for (size_t at = 0; at < text.size(); at = text.find('\n', at) + 1)
        lines.push_back(text.substr(at, text.find('\n', at) + 1 - at));
    return lines;
}

std::string joined(const std::vector<std::string>& lines) {
    std::string text;
    for (const std::string& line : lines) text += line;
    return text;
}

int64_t broken_line(const std::vector<std::string>& lines) {
    const HistoryChain chain = read_chain(joined(lines));
    return chain.broken ? chain.broken->line : 0;
}

}  // namespace

TEST_CASE("each line of a history has the hash of the line before it", "[history_chain]") {
    const TemporaryDirectory directory;
    const std::vector<std::string> lines = random_history(directory.path(), 20);
    REQUIRE(lines.size() == 20);
    std::string previous = sha256_of("");
    for (const std::string& line : lines) {
        CHECK(parse_json(line).at("previous") == previous);
        previous = sha256_of(std::string_view(line).substr(0, line.size() - 1));
    }
    const HistoryChain chain = read_history(directory.path());
    CHECK_FALSE(chain.broken);
    CHECK(chain.first == 1);
    CHECK(chain.head == previous);
    CHECK(chain.lines.size() == 20);
    CHECK(chain.line_of(previous)->number == 20);
    CHECK(chain.line_of(sha256_of("")) == nullptr);
    // The next writer continues.
    HistoryWriter(directory.path()).append(history_event("end", 21));
    CHECK_FALSE(read_history(directory.path()).broken);
}

TEST_CASE("a history without a line, or with one changed, added or moved, breaks there",
          "[history_chain]") {
    const TemporaryDirectory directory;
    const std::vector<std::string> lines = random_history(directory.path(), 12);
    for (int repeat = 0; repeat < 200; ++repeat) {
        // Counted from 0; the last line is not among them, since nothing follows it.
        const auto at = static_cast<size_t>(random_int(0, 10));
        std::vector<std::string> edited = lines;
        CAPTURE(at, lines[at]);

        char& byte = edited[at][static_cast<size_t>(random_int(0, std::ssize(edited[at]) - 2))];
        const char before = byte;
        do byte = static_cast<char>(random_int(32, 126));
        while (byte == before);
        // The line itself, if it no longer has a valid "previous"; else the one after it.
        const int64_t broken = broken_line(edited);
        CAPTURE(edited[at], broken);
        CHECK(broken >= static_cast<int64_t>(at) + 1);
        CHECK(broken <= static_cast<int64_t>(at) + 2);

        edited = lines;
        edited.erase(edited.begin() + static_cast<std::ptrdiff_t>(at));
        CHECK(broken_line(edited) == static_cast<int64_t>(at) + 1);

        edited = lines;
        const auto from = static_cast<size_t>(random_int(0, 11));
        edited.insert(edited.begin() + static_cast<std::ptrdiff_t>(at), lines[from]);
        CHECK(broken_line(edited) == static_cast<int64_t>(from == at ? at + 1 : at) + 1);

        edited = lines;
        std::swap(edited[at], edited[at + 1]);
        CHECK(broken_line(edited) == static_cast<int64_t>(at) + 1);
    }
}

TEST_CASE("the chain begins after an older version's lines, and holds them from then on",
          "[history_chain]") {
    const TemporaryDirectory directory;
    const std::string file = directory / "history.jsonl";
    const bool half = random_int(0, 1);
    const std::string old = R"({"event":"start","step":0})"
                            "\n{\"event\":\"sam\n" +
                            to_text({{"event", "end"}, {"step", 7}, {"reason", random_text()}}) +
                            (half ? "" : "\n");
    write(file, old);
    CHECK(read_history(directory.path()).first == 0);
    HistoryWriter(directory.path()).append(history_event("start", 7));
    const HistoryChain chain = read_history(directory.path());
    CHECK_FALSE(chain.broken);
    REQUIRE(chain.first == 4);
    const Json begins = chain.lines[chain.lines.size() - 2].event;
    CHECK(begins.at("event") == "chain");
    CHECK(begins.at("lines") == 3);
    CHECK(begins.at("step") == 7);

    const std::string whole = read(file);
    const size_t chained = whole.find(R"({"event":"chain")");
    for (int repeat = 0; repeat < 50; ++repeat) {
        std::string edited = whole;
        const auto at = static_cast<size_t>(random_int(0, static_cast<int64_t>(chained) - 2));
        edited[at] = edited[at] == 'x' ? 'y' : 'x';
        const HistoryChain broken = read_chain(edited);
        CAPTURE(edited);
        REQUIRE(broken.broken);
        CHECK(broken.broken->line <= 4);
    }
    CHECK(read_chain(whole.substr(chained)).broken->line == 1);
    CHECK(read_chain("{}\n" + whole).broken->line == 5);
}

TEST_CASE("who writes to a history cuts off a torn last line, and records it", "[history_chain]") {
    const TemporaryDirectory directory;
    const std::string file = directory / "history.jsonl";
    const std::vector<std::string> lines = random_history(directory.path(), 4);
    const std::string whole = joined(lines);
    for (size_t cut = lines[0].size(); cut <= whole.size(); ++cut) {
        write(file, whole.substr(0, cut));
        size_t kept = 0, bytes = 0;
        while (kept < lines.size() && bytes + lines[kept].size() - 1 <= cut)
            bytes += lines[kept++].size();
        CAPTURE(cut, kept);
        CHECK_FALSE(read_history(directory.path()).broken);
        HistoryWriter(directory.path()).append(history_event("end", 9));
        const HistoryChain chain = read_history(directory.path());
        CHECK_FALSE(chain.broken);
        const std::string text = read(file);
        const auto end = lines.begin() + static_cast<std::ptrdiff_t>(kept);
        CHECK(text.starts_with(joined({lines.begin(), end})));
        const bool torn = bytes < cut;
        REQUIRE(chain.lines.size() == kept + (torn ? 2 : 1));
        CHECK(chain.lines.back().event.at("event") == "end");
        if (!torn) continue;
        const Json& event = chain.lines[kept].event;
        CHECK(event.at("event") == "torn");
        CHECK(event.at("bytes") == cut - bytes);
        CHECK(event.at("text") == whole.substr(bytes, cut - bytes));
    }
}

TEST_CASE("an event from outside is appended to the chain of a run that nobody trains",
          "[history_chain]") {
    const TemporaryDirectory directory;
    random_history(directory.path(), 5);
    append_to_history(directory.path(), {{"event", "restart"}, {"reason", "host b is gone"}});
    const HistoryChain chain = read_history(directory.path());
    CHECK_FALSE(chain.broken);
    REQUIRE(chain.lines.size() == 6);
    CHECK(chain.lines.back().event.at("step") == 4);
    CHECK(chain.lines.back().event.at("reason") == "host b is gone");
    CHECK(chain.lines.back().event.contains("time"));
    CHECK(contains(error_of([&] {
                       append_to_history(directory / "none", {{"event", "restart"}});
                   }),
                   "there is no folder"));
}
