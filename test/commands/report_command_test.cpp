// `train_gpt report`, the pages and the history that runs write, and `train --quiet`.
#include <csignal>

#include <unistd.h>

#include "test/commands/program.h"

using namespace train_gpt;

namespace {

/// The lines of a run's history with this event.
std::vector<SortedJson> events_of(const std::string& run, const std::string& event) {
    std::vector<SortedJson> events;
    std::istringstream lines(read(run + "/history.jsonl"));
    for (std::string line; std::getline(lines, line);)
        if (SortedJson json = SortedJson::parse(line); json.at("event") == event)
            events.push_back(json);
    return events;
}

/// The steps of a curve in a page.
std::vector<int64_t> steps_in(const std::string& page, const std::string& curve) {
    const std::string begin = "id=\"data\">";
    const size_t at = page.find(begin) + begin.size();
    const SortedJson data = SortedJson::parse(page.substr(at, page.find("</script>", at) - at));
    std::vector<int64_t> steps;
    int64_t step = 0;
    for (const SortedJson& difference : data.at("runs").at(0).at("curves").at(curve).at("x"))
        steps.push_back(step += difference.get<int64_t>());
    return steps;
}

}  // namespace

TEST_CASE("a run leaves a page with all its steps, and its samples, starts and ends", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "6"})));
    const std::string first = read(run + "/report.html");
    CHECK(contains(first, "stopped: --stop-at"));
    CHECK(steps_in(first, "loss") == std::vector<int64_t>{1, 2, 3, 4, 5, 6});
    check_succeeds(train_gpt_with(w.train(run)));

    const auto starts = events_of(run, "start"), ends = events_of(run, "end");
    REQUIRE(starts.size() == 2);
    REQUIRE(ends.size() == 2);
    CHECK(starts[0].at("resumes") == false);
    CHECK(starts[1].at("resumes") == true);
    CHECK(starts[1].at("step") == 6);
    CHECK(starts[1].at("ranks") == 1);
    CHECK(starts[1].at("hosts").size() == 1);
    CHECK(starts[1].at("parameters") > 0);
    CHECK(starts[1].at("vocabulary") == 300);
    CHECK(starts[1].at("tokenizer").get<std::string>().size() == 16);
    for (const char* purpose : {"parameters", "gradients", "moments", "activations"})
        CHECK(starts[1].at("memory").at(purpose) > 0);
    CHECK(ends[0].at("reason") == "--stop-at");
    CHECK(ends[1].at("reason") == "complete");
    CHECK(ends[1].at("code") == 0);
    std::vector<int64_t> sampled, saved;
    for (const SortedJson& sample : events_of(run, "sample")) {
        sampled.push_back(sample.at("step").get<int64_t>());
        CHECK(sample.at("prompt") == "a");
    }
    for (const SortedJson& checkpoint : events_of(run, "checkpoint"))
        saved.push_back(checkpoint.at("step").get<int64_t>());
    CHECK(sampled == std::vector<int64_t>{4, 8, 12});
    CHECK(saved == std::vector<int64_t>{6, 12});

    const std::string page = read(run + "/report.html");
    CHECK(contains(page, "<td>complete</td>"));
    CHECK(contains(page, "stopped (--stop-at), resumed"));
    CHECK(occurrences(page, "<figure>") == 3);
    CHECK(steps_in(page, "loss").size() == 12);
    CHECK(steps_in(page, "val_loss") == std::vector<int64_t>{0, 5, 10, 12});
}

TEST_CASE("a run writes its page at every checkpoint", "[cli]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    Process process(
        Workplace::get().train(run, endless + Arguments{"--set", "checkpoint.every=7"}));
    const auto page_of = [&](size_t checkpoints) {
        return process.wait_until([&] {
            return fs::exists(run + "/report.html") &&
                   steps_in(read(run + "/report.html"), "loss").back() >=
                       static_cast<int64_t>(7 * checkpoints);
        });
    };
    REQUIRE(page_of(1));
    CHECK(contains(read(run + "/report.html"), "running when this page was written"));
    REQUIRE(page_of(3));
    process.signal(SIGTERM);
    check_stopped(process.finish());
    CHECK(contains(read(run + "/report.html"), "stopped: SIGTERM"));
    CHECK(events_of(run, "end").back().at("code") == 75);
}

TEST_CASE("a run that fails says so in its page", "[cli]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    const Outcome failed = train_gpt_with(
        Workplace::get().train(run, {"--set", "optimizer.learning_rate=1e30", "--set",
                                     "optimizer.grad_clip=0", "--set", "evaluation.every=0"}));
    CHECK(failed.code == 1);
    CHECK(contains(failed.err, "is not finite"));
    const SortedJson end = events_of(run, "end").back();
    CHECK(end.at("code") == 1);
    CHECK(contains(end.at("reason").get<std::string>(), "is not finite"));
    CHECK(contains(read(run + "/report.html"), "is not finite"));
}

TEST_CASE("a page that cannot be written is mentioned once, and ends nothing", "[cli]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    fs::create_directories(run + "/report.html/taken");
    const Outcome outcome = check_succeeds(
        train_gpt_with(Workplace::get().train(run, {"--set", "checkpoint.every=4"})));
    CHECK(occurrences(outcome.err, "report.html") >= 1);
    CHECK(occurrences(outcome.err, "the run continues without a current report.html") == 1);
    CHECK(checkpoints_in(run) == std::vector<int64_t>{4, 8, 12});
}

TEST_CASE("report compares runs, and refuses what is none in a sentence", "[cli]") {
    const TemporaryDirectory directory;
    const std::string &run = finished_run(), other = directory / "other";
    check_succeeds(
        train_gpt_with(Workplace::get().train(other, {"--set", "model.n_layer=3", "--quiet"})));
    const std::string page = directory / "both.html", picture = directory / "both.svg";
    const Outcome both =
        check_succeeds(train_gpt_with({"report", run, other, "--out", page, "--picture", picture}));
    CHECK(contains(both.out, "note: these runs train different models (model.n_layer: 2 and 3)"));
    CHECK(contains(both.out, "wrote " + page + " and " + picture));
    CHECK(contains(read(page), "Where the runs differ"));
    CHECK(read(picture).starts_with("<svg "));

    check_refused(train_gpt_with({"report"}), 2, {"runs is required"});
    check_refused(train_gpt_with({"report", run, run}), 1, {"named twice"});
    check_refused(train_gpt_with({"report", run + "/" + step_folder(12)}), 1,
                  {step_folder(12), "is a checkpoint"});
    check_refused(train_gpt_with({"report", directory / "none"}), 1, {"none", "no folder"});
    check_refused(train_gpt_with({"report", run, "--out", directory / "no/page.html"}), 1,
                  {"no/page.html"});
    check_refused(train_gpt_with({"report", run, "--out", page}, {.file_bytes = 5000}), 1, {page});
    CHECK(contains(read(page), "Where the runs differ"));  // the page from before
}

TEST_CASE("report --tolerance compares two runs, and its exit code is the verdict", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string &run = finished_run(), same = directory / "same", other = directory / "other";
    check_succeeds(train_gpt_with(w.train(same, {"--quiet"})));
    check_succeeds(
        train_gpt_with(w.train(other, {"--quiet", "--set", "optimizer.learning_rate=0.0029999"})));
    for (const Arguments& zero : {Arguments{"--tolerance"}, {"--tolerance", "0"}}) {
        const Outcome equal = check_succeeds(train_gpt_with(Arguments{"report", run, same} + zero));
        CHECK(contains(equal.out, "common steps    12, from 1 to 12\n"));
        CHECK(contains(equal.out, "verdict         the same in all common steps"));
        const Outcome different = train_gpt_with(Arguments{"report", run, other} + zero);
        CHECK(different.code == 1);
        CHECK(different.err.empty());
        CHECK(contains(different.out, "first different at step"));
        CHECK(contains(different.out, "verdict         different: by "));
    }
    CHECK(contains(check_succeeds(train_gpt_with({"report", run, other, "--tolerance", "0.5"})).out,
                   "verdict         within the tolerance 0.5"));
    CHECK_FALSE(fs::exists(other + "/replay-12"));

    check_refused(train_gpt_with({"report", run, "--tolerance", "0"}), 2,
                  {"--tolerance compares two runs, and 1 is named"});
    check_refused(train_gpt_with({"report", run, same, other, "--tolerance", "0"}), 2,
                  {"3 are named"});
    for (const char* value : {"-1", "nan", "some"})
        check_refused(train_gpt_with({"report", run, same, "--tolerance", value}), 2,
                      {"--tolerance", value});
    check_refused(train_gpt_with({"report", run, same, "--tolerance", "0", "--out", "x"}), 2,
                  {"--out"});
    check_refused(train_gpt_with({"report", run, directory / "none", "--tolerance", "0"}), 1,
                  {"none", "no folder"});

    CHECK(contains(check_succeeds(train_gpt_with({"report", run, same, "--gap", "0"})).out,
                   "mean gap        +0.0000, +0.0000, +0.0000 nats"));
    const Outcome gap = train_gpt_with({"report", run, other, "--gap", "0"});
    CHECK(gap.code == 1);
    CHECK(contains(gap.out, "verdict         different: by "));
    check_refused(train_gpt_with({"report", run, "--gap", "0"}), 2,
                  {"--gap compares two runs, and 1 is named"});
    check_refused(train_gpt_with({"report", run, same, "--gap", "0", "--tolerance", "0"}), 2,
                  {"give one of them"});
}

TEST_CASE("replay needs a run and a step", "[cli]") {
    check_refused(train_gpt_with({"replay"}), 2, {"run is required"});
    check_refused(train_gpt_with({"replay", finished_run()}), 2, {"--to is required"});
    for (const char* step : {"0", "-3", "last"})
        check_refused(train_gpt_with({"replay", finished_run(), "--to", step}), 2, {"--to", step});
    check_refused(train_gpt_with({"replay", finished_run(), "--to", "3", "model.n_layer=4"}), 2,
                  {"--set model.n_layer=4"});
}

TEST_CASE("--quiet prints warnings and errors only", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    const Outcome quiet = check_succeeds(train_gpt_with(w.train(run, {"--quiet"})));
    CHECK(quiet.out.empty());
    CHECK(quiet.err.empty());
    check_same_state(run, finished_run(), 12);
    CHECK(check_succeeds(train_gpt_with(w.train(run, {"--quiet"}))).out.empty());  // complete
    check_refused(train_gpt_with(w.train(directory / "x", {"--quiet", "--profile", "3"})), 2,
                  {"--quiet", "--profile"});
    const Outcome failed = train_gpt_with(w.train(run, {"--quiet", "--set", "model.n_layer=3"}));
    CHECK(failed.code == 1);
    CHECK(failed.out.empty());
    CHECK_FALSE(failed.err.empty());
}
