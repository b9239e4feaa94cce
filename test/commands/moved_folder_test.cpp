// train_gpt train: the run's folder, or a file in it, is removed, renamed or replaced meanwhile.
#include <algorithm>
#include <csignal>

#include <sys/stat.h>

#include "test/commands/program.h"
#include "test/training/event_reader.h"

using namespace train_gpt;

namespace {

// Long enough for what happens meanwhile.
const Arguments saving{"--set", "schedule.steps=5000", "--set", "checkpoint.every=5"};

/// The step of the newest checkpoint; a save that was cut short may have left others.
int64_t last_step_of(const fs::path& run) {
    int64_t newest = -1;
    for (const std::string& name : names_in(run))
        if (name.starts_with("step-") && name.size() == step_folder(0).size())
            newest = std::max<int64_t>(newest, std::stoll(name.substr(5)));
    return newest;
}

/// The bytes of all files of a folder, by path.
std::map<std::string, std::string> files_below(const fs::path& folder) {
    std::map<std::string, std::string> contents;
    for (const auto& entry : fs::recursive_directory_iterator(folder))
        contents[fs::relative(entry.path(), folder)] =
            entry.is_regular_file() ? read(entry.path()) : "";
    return contents;
}

}  // namespace

TEST_CASE("a run whose folder is removed, renamed or replaced ends with a sentence and code 1",
          "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path run = directory / "run", moved = directory / "moved",
                   other = directory / "other";
    // Every step has something to write, or only every fifth one.
    const Arguments options =
        saving + Arguments{"--set", concat("log.every=", random_int(0, 1) ? 1 : 5)};
    Process process(w.train(run, options));
    REQUIRE(process.wait_for_step(5 * random_int(1, 4)));

    SECTION("removed") {
        // The run may be writing a file while its folder is emptied.
        REQUIRE(process.wait_until([&] {
            std::error_code code;
            fs::remove_all(run, code);
            return !code;
        }));
        const Outcome outcome = process.finish();
        CAPTURE(outcome.err);
        CHECK(outcome.code == 1);
        CHECK(contains(outcome.err, run.string()));
        CHECK(contains(outcome.err, "was removed, renamed or replaced while the run was writing"));
        CHECK_FALSE(fs::exists(run));
    }
    SECTION("renamed") {
        fs::rename(run, moved);
        const Outcome outcome = process.finish();
        CAPTURE(outcome.err);
        CHECK(outcome.code == 1);
        CHECK(contains(outcome.err, concat("the run folder ", run.string(), " was renamed to ",
                                           fs::canonical(moved).string())));
        CHECK_FALSE(fs::exists(run));
        // Nothing that it has learned is lost.
        const int64_t saved = last_step_of(moved);
        const auto lines = metrics_of(moved);
        CHECK(saved >= lines.back().at("step").get<int64_t>());
        const Outcome more = check_succeeds(train_gpt_with(
            w.train(moved, saving + Arguments{"--stop-at", std::to_string(saved + 2)})));
        CHECK(contains(more.out, concat("step ", saved + 1, "/")));
    }
    SECTION("replaced by an empty folder") {
        fs::rename(run, moved);
        fs::create_directory(run);
        const Outcome outcome = process.finish();
        CHECK(outcome.code == 1);
        CHECK(contains(outcome.err, "was renamed to"));
        CHECK(fs::is_empty(run));
    }
    SECTION("replaced by the folder of another run") {
        fs::copy(finished_run(), other, fs::copy_options::recursive);
        const auto before = files_below(other);
        fs::rename(run, moved);
        fs::rename(other, run);
        CHECK(process.finish().code == 1);
        CHECK(files_below(run) == before);
    }
    SECTION("without its lock, so that another run could begin") {
        fs::remove(run / "lock");
        const Outcome outcome = process.finish();
        CHECK(outcome.code == 1);
        CHECK(contains(outcome.err, "or the file lock in it, was removed"));
    }
}

TEST_CASE("files that are removed or renamed while a run writes them are there again, whole",
          "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    const int64_t last = 400;
    Process process(w.train(run, {"--set", concat("schedule.steps=", last), "--set",
                                  "checkpoint.every=50", "--set", "log.every=1"}));
    REQUIRE(process.wait_for_step(random_int(50, 60)));
    const fs::path events = event_reader::event_files(run).at(0);
    fs::remove(run / "metrics.jsonl");
    fs::rename(run / "history.jsonl", directory / "renamed");
    fs::remove(events);
    fs::remove(run / "report.html");
    const Outcome outcome = check_succeeds(process.finish());
    for (const fs::path& file : {run / "metrics.jsonl", run / "history.jsonl", events})
        CHECK(occurrences(outcome.err, file.string() + " was removed or renamed while") == 1);

    int64_t steps = 0;
    for (const SortedJson& line : metrics_of(run)) steps += line.contains("loss") ? 1 : 0;
    CHECK(steps == last);
    CHECK(event_reader::board_of(run).scalars.at("train/loss").size() == last);
    const std::string history = read(run / "history.jsonl");
    CHECK(occurrences(history, "\"start\"") == 1);
    CHECK(occurrences(history, "\"complete\"") == 1);
    CHECK(fs::exists(run / "report.html"));
}

TEST_CASE("a file that takes the place of one that a run writes ends the run, with its step saved",
          "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    Process process(w.train(run, saving));
    REQUIRE(process.wait_for_step(random_int(5, 15)));
    write(directory / "other", "{\"step\": 1}\n");
    fs::path file = run / "metrics.jsonl";
    SECTION("metrics.jsonl") {}
    SECTION("TensorBoard's file") { file = event_reader::event_files(run).at(0); }
    fs::rename(directory / "other", file);
    const Outcome outcome = process.finish();
    CHECK(outcome.code == 1);
    CHECK(contains(outcome.err, file.string() + " is no longer the file that the run was writing"));
    CHECK(read(file) == "{\"step\": 1}\n");
    const std::string history = read(run / "history.jsonl");
    const SortedJson end =
        SortedJson::parse(history.substr(history.rfind('\n', history.size() - 2) + 1));
    CHECK(contains(end.at("reason"), "is no longer the file"));
    CHECK(end.at("step") == last_step_of(run));
}

TEST_CASE("a report by who cannot open a run's lock says that it is running", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path run = directory / "run", page = directory / "page.html";
    const auto report = [&] {
        check_succeeds(
            train_gpt_with({"report", run, "--out", page}, {.bound_by_permissions = true}));
        return read(page);
    };
    Process process(w.train(run, endless));
    REQUIRE(process.wait_for_step(2));
    REQUIRE(::chmod((run / "lock").c_str(), 0) == 0);
    CHECK(contains(report(), "running when this page was written"));
    process.signal(SIGKILL);
    process.finish();
    CHECK(contains(report(), "ended without saying why"));
}
