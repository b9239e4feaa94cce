#include "training/watch/run_history.h"

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/json_text.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

TEST_CASE("a resumed run's history loses no line but the one that was half written",
          "[run_history]") {
    const TemporaryDirectory directory;
    {
        RunHistory history(directory.path(), true);
        history.spike(5, "a");
        history.sample(5, "a", "b\nc");
    }
    const std::string whole = read(directory / "history.jsonl");
    const size_t first = whole.find('\n');  // a line is whole also without the end that it lacks
    for (size_t cut = 0; cut <= whole.size(); ++cut) {
        CAPTURE(whole, cut);
        write(directory / "history.jsonl", whole.substr(0, cut));
        for (const int64_t step : {6, 7}) RunHistory(directory.path(), true).spike(step, "a");
        RunHistory(directory.path(), false).spike(8, "a");  // another rank's

        std::vector<std::pair<std::string, int64_t>> events;
        std::istringstream lines(read(directory / "history.jsonl"));
        for (std::string line; std::getline(lines, line);)
            if (const Json json = parse_json(line); json.at("event") != "torn")
                events.emplace_back(json.at("event"), json.at("step"));
        std::vector<std::pair<std::string, int64_t>> expected{{"spike", 5}, {"sample", 5}};
        expected.resize(cut + 1 >= whole.size() ? 2 : cut >= first ? 1 : 0);
        expected.insert(expected.end(), {{"spike", 6}, {"spike", 7}});
        CHECK(events == expected);
    }
}
