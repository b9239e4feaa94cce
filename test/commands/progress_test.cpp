// What a run prints on a terminal and in its first minutes, and what it writes to metrics.jsonl
// then.
#include <algorithm>
#include <csignal>
#include <regex>

#include "test/commands/terminal.h"

using namespace train_gpt;

namespace {

constexpr const char* ctrl_c = "\x03";

const Arguments nothing_between{"--set", "evaluation.every=0", "--set", "sampling.every=0"};

/// A run whose steps have so many micro-batches that none of them ends.
const Arguments endless_step{"--set", "batch.tokens_per_step=268435456"};

/// The steps of those lines of a run's metrics that have a key.
std::vector<int64_t> steps_with(const std::string& run, const char* key) {
    std::vector<int64_t> steps;
    for (const SortedJson& line : metrics_of(run))
        if (line.contains(key)) steps.push_back(line.at("step").get<int64_t>());
    return steps;
}

std::vector<double> values_of(const std::string& run, const char* key) {
    std::vector<double> values;
    for (const SortedJson& line : metrics_of(run))
        if (line.contains(key)) values.push_back(line.at(key).get<double>());
    return values;
}

}  // namespace

TEST_CASE("the progress line fits the terminal's width, also after it has changed", "[cli]") {
    if (skip_without_terminals()) return;
    const TemporaryDirectory directory;
    const int narrow = static_cast<int>(random_int(45, 80));
    TerminalProcess process(Workplace::get().train(directory / "run", endless + nothing_between),
                            200);
    // What is said before the first step is longer.
    REQUIRE(
        process.wait_until([&] { return process.screen().find("step 1/") != std::string::npos; }));
    const auto lines_at = [&](int columns) {
        process.resize(columns);
        const size_t begin = process.screen().size();
        REQUIRE(process.wait_until([&] { return process.screen().size() > begin + 3000; }));
        Arguments lines = drawn_lines(process.screen().substr(begin));
        // The first lines may have begun at the old width; the last one is incomplete.
        return Arguments(lines.begin() + 3, lines.end() - 1);
    };
    for (const std::string& line : lines_at(200)) CHECK(contains(line, "% of peak | "));
    for (const int columns : {narrow, 20, narrow}) {
        const Arguments lines = lines_at(columns);
        REQUIRE(lines.size() > 10);
        for (const std::string& line : lines) {
            CAPTURE(columns, line);
            CHECK(static_cast<int>(line.size()) <= columns);
            CHECK(std::isdigit(line[line.starts_with("step ") ? 5 : 0]));
            if (columns == narrow) CHECK(contains(line, " | loss "));
            if (columns == narrow) CHECK(contains(line, " | ETA "));
        }
    }
    CHECK(contains(lines_at(200).front(), " | norm "));
    process.type(ctrl_c);
    CHECK(process.finish() == 130);
    CHECK(contains(process.screen(), "SIGINT: step "));
}

TEST_CASE("steps that take long are announced, and shown by their micro-batches", "[cli]") {
    if (skip_without_terminals()) return;
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    TerminalProcess process(Workplace::get().train(run, endless_step + nothing_between), 80);
    const auto micro_batch = [&] {
        const size_t at = process.screen().rfind("step 1: micro-batch ");
        return at == std::string::npos ? 0 : number_after(process.screen().substr(at), "batch ");
    };
    REQUIRE(process.wait_until([&] { return micro_batch() > 1; }));
    CHECK(process.screen().find("a step takes at least ") <
          process.screen().find("micro-batch 1/"));
    const double before = micro_batch();
    REQUIRE(process.wait_until([&] { return micro_batch() > before; }));
    for (const std::string& line : drawn_lines(process.screen()))
        if (contains(line, "micro-batch ")) CHECK(line.size() <= 80);

    // Stopped before its first step is done, the run leaves nothing to resume from.
    process.type(ctrl_c);
    CHECK(process.finish() == 130);
    std::string words = process.screen();  // a terminal breaks lines at words
    words = std::regex_replace(words, std::regex("\\s+"), " ");
    CHECK(contains(words,
                   "SIGINT: no step was finished, so there is nothing to save; "
                   "the same command starts the run again"));
    CHECK(checkpoints_in(run).empty());
    const Outcome again =
        check_succeeds(train_gpt_with(Workplace::get().train(run, {"--stop-at", "1"})));
    CHECK_FALSE(contains(again.out, "resuming"));
    CHECK_FALSE(contains(again.out, "a step takes"));
}

TEST_CASE("an evaluation shows its progress, and ends at Ctrl-C", "[cli]") {
    if (skip_without_terminals()) return;
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    check_succeeds(train_gpt_with(w.train(run, nothing_between + Arguments{"--stop-at", "1"})));
    TerminalProcess process(
        w.train(run, nothing_between +
                         Arguments{"--set", "data.val=synthetic", "--set", "evaluation.every=2"}),
        100);
    REQUIRE(process.wait_until([&] { return contains(process.screen(), " | evaluation: "); }));
    process.type(ctrl_c);
    CHECK(process.finish() == 130);
    CHECK(contains(process.screen(), "SIGINT: step 2 of 12 is saved"));
    CHECK(checkpoints_in(run) == std::vector<int64_t>{1, 2});
}

TEST_CASE("an evaluation at the start that would take long is left out, and a line says so",
          "[cli]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    Process process(Workplace::get().train(run, slow + Arguments{"--set", "data.val=synthetic"}));
    REQUIRE(process.wait_until(
        [&] { return contains(process.out(), "step 0: no evaluation, which would take about "); }));
    process.signal(SIGTERM);
    check_stopped(process.finish());
    CHECK(steps_with(run, "val_loss").empty());
}

TEST_CASE("a new run is evaluated before its first step, once, with no influence on it", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run", plain = directory / "plain";
    const Outcome first = check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "3"})));
    CHECK(contains(first.out, "step 0: validation loss "));
    CHECK(contains(first.out, "note: the validation data are the end of the text"));
    const Outcome second = check_succeeds(train_gpt_with(w.train(run)));
    CHECK_FALSE(contains(second.out, "step 0: "));
    CHECK(steps_with(run, "val_loss") == std::vector<int64_t>{0, 5, 10, 12});
    check_succeeds(train_gpt_with(w.train(plain, {"--set", "evaluation.every=0"})));
    CHECK(steps_with(plain, "val_loss") == std::vector<int64_t>{12});
    CHECK(values_of(run, "loss") == values_of(plain, "loss"));
    CHECK(values_of(run, "val_loss").back() == values_of(plain, "val_loss").back());

    // It is the loss of the weights that the run starts with.
    const std::string still = directory / "still";
    check_succeeds(train_gpt_with(
        w.train(still, {"--set", "optimizer.learning_rate=1e-30", "--stop-at", "1"})));
    const Outcome eval = check_succeeds(train_gpt_with({"eval", still}));
    CHECK(number_after(eval.out, "validation loss ") ==
          Approx(values_of(run, "val_loss").front()).epsilon(1e-5));

    // A folder in which nothing was saved starts from the beginning again.
    fs::remove_all(run + "/" + step_folder(3));
    fs::remove_all(run + "/" + step_folder(12));
    check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "1"})));
    CHECK(steps_with(run, "val_loss") == std::vector<int64_t>{0});
}

TEST_CASE("the first step has a line of its own, whatever the interval of lines", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    const Arguments options = nothing_between + Arguments{"--set", "log.every=5"};
    check_succeeds(train_gpt_with(w.train(run, options + Arguments{"--stop-at", "7"})));
    // After a resume it is printed but not logged, so that the file is the same as without the
    // stop.
    const Outcome resumed = check_succeeds(train_gpt_with(w.train(run, options)));
    CHECK(contains(resumed.out, "step 8/12 | "));
    CHECK_FALSE(contains(resumed.out, "step 9/12 | "));
    CHECK(steps_with(run, "loss") == std::vector<int64_t>{1, 5, 10, 12});
    const auto all = metrics_of(finished_run());
    for (const SortedJson& line : metrics_of(run)) {
        CHECK(line.at("tokens").get<int64_t>() == 256 * line.at("step").get<int64_t>());
        if (!line.contains("loss")) continue;
        CAPTURE(line.dump());
        CHECK(std::ranges::any_of(all, [&](const SortedJson& other) {
            return other.contains("loss") && other.at("step") == line.at("step") &&
                   other.at("loss") == line.at("loss");
        }));
    }
}
