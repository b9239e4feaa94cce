// Exit codes: 0 done, 1 failed, 2 wrong usage, 3 ended at once by a second signal, 75 stopped early
// with everything saved, 130 the same after Ctrl-C. Signals at each moment of a run, and ranks, are
// tested in train_command_test.cpp and test/parallel/failure_test.cpp.
#include <chrono>
#include <csignal>

#include "test/commands/program.h"

using namespace train_gpt;

TEST_CASE("the exit code says whether to run the same command again", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "9"})));  // stopping was requested
    // Starts that are cut short by their time limit complete the run together.
    int starts = 0, code = 75;
    for (; code == 75 && starts < 100; ++starts)
        code = train_gpt_with(w.train(run, {"--set", "schedule.max_minutes=1e-9"})).code;
    CHECK(code == 0);
    CHECK(starts == 3);  // each finishes the step that it is in
    CHECK(checkpoints_in(run).back() == 12);
    CHECK(train_gpt_with(w.train(run)).code == 0);

    CHECK(train_gpt_with(w.train(run, {"--set", "data.train=nowhere_*.bin"})).code == 1);
    CHECK(train_gpt_with(w.train(run, {"--nonsense"})).code == 2);
    const std::string help = check_succeeds(train_gpt_with({"--help"})).out;
    for (const char* part : {"0 done", "1 failed", "2 wrong usage", "3 ", "75 ", "130 "})
        CHECK(contains(help, part));
}

TEST_CASE("a signal while libraries start ends a command with the code of one that can be repeated",
          "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path library = fs::path(this_program()).parent_path() / "observed/early_signal.so";
    REQUIRE(fs::exists(library));
    for (const int number : {SIGTERM, SIGUSR1, SIGHUP, SIGINT}) {
        CAPTURE(number);
        const Surroundings surroundings{
            .environment = {concat("LD_PRELOAD=", library.string()),
                            concat("EARLY_SIGNAL=", number),
                            "ASAN_OPTIONS=verify_asan_link_order=0:detect_leaks=0"}};
        const Arguments arguments =
            random_int(0, 1) ? w.train(directory / "run") : Arguments{"plan", w.config()};
        const Outcome outcome =
            check_stopped(train_gpt_with(arguments, surroundings), number == SIGINT ? 130 : 75);
        // A rank waits a moment for another rank's error; until then a run may begin its loop.
        CHECK((contains(outcome.err, "ended with nothing to save") ||
               contains(outcome.out, "no step was finished, so there is nothing to save")));
    }
}

TEST_CASE("a run stopped before its first step is done leaves no checkpoint and says so", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    for (const int number : {SIGTERM, SIGINT}) {
        Process process(w.train(
            run, {"--set", "batch.tokens_per_step=268435456", "--set", "evaluation.every=0"}));
        REQUIRE(process.wait_until([&] { return contains(process.out(), "training "); }));
        process.signal(number);
        const Outcome outcome = check_stopped(process.finish(), number == SIGINT ? 130 : 75);
        CHECK(contains(outcome.out,
                       "no step was finished, so there is nothing to save; the same "
                       "command starts the run again"));
        CHECK(checkpoints_in(run).empty());
    }
}

TEST_CASE("a run that is complete says so without loading its model", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    fs::copy(finished_run(), run, fs::copy_options::recursive);
    const auto before = names_in(run);
    const Outcome outcome = check_succeeds(train_gpt_with(w.train(run)));
    const auto metrics = metrics_of(run);
    CHECK(outcome.out.starts_with("note: since this checkpoint "));  // about another run_dir
    CHECK(contains(outcome.out, "\nalready complete: step 12 is saved in " + run + "\n"));
    for (const char* part : {"resuming", "training ", "--- sample"})
        CHECK_FALSE(contains(outcome.out, part));
    CHECK(names_in(run) == before);
    CHECK(metrics == metrics_of(finished_run()));
    // Without its last evaluation, the run is not complete.
    fs::remove(run + "/metrics.jsonl");
    const Outcome evaluated = check_succeeds(train_gpt_with(w.train(run)));
    CHECK_FALSE(contains(evaluated.out, "already complete"));
    CHECK(metrics_of(run).back() == metrics.back());
}
