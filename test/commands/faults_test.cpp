// Disks that fail or do not answer while a run saves, and clocks that jump.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>

#include "test/commands/program.h"
#include "training/files/checkpoint.h"

using namespace train_gpt;

namespace {

/// A program on a machine with a faulty disk or clock (faulty_machine.cpp).
Surroundings faulty(const std::string& variable) {
    const fs::path library = fs::path(this_program()).parent_path() / "observed/faulty_machine.so";
    REQUIRE(fs::exists(library));
    return {.environment = {concat("LD_PRELOAD=", library.string()), variable,
                            "ASAN_OPTIONS=verify_asan_link_order=0:detect_leaks=0"}};
}

std::vector<int64_t> whole_checkpoints(const fs::path& run) {
    std::vector<int64_t> steps;
    for (const fs::path& checkpoint : list_checkpoints(run)) {
        CAPTURE(checkpoint.string());
        CHECK(error_of([&] { verify_checkpoint(checkpoint, Verify::everything); }) == "");
        steps.push_back(checkpoint_step(checkpoint));
    }
    return steps;
}

/// The step of the newest checkpoint; 0 if there is none.
int64_t newest_step(const fs::path& run) {
    const std::vector<fs::path> checkpoints = list_checkpoints(run);
    return checkpoints.empty() ? 0 : checkpoint_step(checkpoints.front());
}

Arguments saves(bool in_background, int keep) {
    return {"--set", "checkpoint.every=4",
            "--set", concat("checkpoint.keep=", keep),
            "--set", concat("checkpoint.async=", in_background ? "on" : "off")};
}

const std::string goes_on =
    "; training continues, and the next checkpoint is written when it is due";

}  // namespace

TEST_CASE("a checkpoint that cannot be flushed is reported, and the next one is tried on time",
          "[cli]") {
    const Workplace& w = Workplace::get();
    for (const int error : {ENOSPC, EDQUOT, EIO}) {
        const bool in_background = random_int(0, 1);
        CAPTURE(error, in_background);
        const TemporaryDirectory directory;
        const std::string run = directory / "run", disk = directory / "disk";
        const Arguments options = saves(in_background, 1);
        check_succeeds(
            train_gpt_with(w.train(run, options + endless + Arguments{"--stop-at", "4"})));
        write(disk, std::to_string(error));
        Process process(w.train(run, options + endless), faulty("FAULTY_DISK=" + disk));
        REQUIRE(process.wait_until(
            [&] { return contains(process.err(), "warning: step 12 of 1000000 is not saved: "); }));
        CAPTURE(process.err());
        for (const int step : {8, 12})
            CHECK(contains(process.err(), concat("warning: step ", step,
                                                 " of 1000000 is not saved: cannot write ")));
        CHECK(contains(process.err(), concat(": ", std::strerror(error), "; ")));
        CHECK(contains(process.err(), goes_on));
        CHECK(whole_checkpoints(run) == std::vector<int64_t>{4});
        fs::remove(disk);
        REQUIRE(process.wait_until([&] { return newest_step(run) > 12; }));
        process.signal(SIGTERM);
        check_stopped(process.finish());
        const std::vector<int64_t> saved = whole_checkpoints(run);
        CHECK(saved.size() == 1);
        const Outcome verified = check_succeeds(train_gpt_with({"verify", run}));
        CHECK(contains(read(run + "/history.jsonl"), R"("event":"failure")"));

        const Arguments stop{"--stop-at", std::to_string(saved.at(0) + 1)};
        check_succeeds(train_gpt_with(w.train(run, options + endless + stop)));
        check_succeeds(train_gpt_with(w.train(directory / "whole", options + endless + stop)));
        check_same_state(directory / "whole", run, saved.at(0) + 1);
    }
}

TEST_CASE(
    "where the newest checkpoint is damaged and no other can be written, the last whole one "
    "stays",
    "[cli]") {
    const Workplace& w = Workplace::get();
    for (const bool in_background : {false, true}) {
        CAPTURE(in_background);
        const TemporaryDirectory directory;
        const std::string run = directory / "run", disk = directory / "disk";
        check_succeeds(train_gpt_with(
            w.train(run, saves(in_background, 2) + endless + Arguments{"--stop-at", "8"})));
        REQUIRE(whole_checkpoints(run) == std::vector<int64_t>{8, 4});
        const std::string damaged = run + "/" + step_folder(8) + "/" + optimizer_file;
        std::string bytes = read(damaged);
        bytes[static_cast<size_t>(random_int(0, std::ssize(bytes) - 1))] ^= 1;
        write(damaged, bytes);

        const Arguments keeps_one = saves(in_background, 1) + endless;
        write(disk, std::to_string(EIO));
        Process process(w.train(run, keeps_one), faulty("FAULTY_DISK=" + disk));
        REQUIRE(
            process.wait_until([&] { return contains(process.err(), "step 16 of 1000000 is "); }));
        process.signal(SIGKILL);
        CHECK(process.finish().code == -SIGKILL);
        CHECK(whole_checkpoints(run) == std::vector<int64_t>{4});
        const Outcome resumed =
            check_succeeds(train_gpt_with(w.train(run, keeps_one + Arguments{"--stop-at", "12"})));
        CHECK(contains(resumed.out, "resuming from " + run + "/" + step_folder(4)));
        CHECK(whole_checkpoints(run) == std::vector<int64_t>{12});
        CHECK(fs::exists(run + "/" + step_folder(8) + ".damaged"));
    }
}

TEST_CASE("a run folder that becomes read-only is reported, and training continues", "[cli]") {
    const Workplace& w = Workplace::get();
    for (const bool in_background : {false, true}) {
        CAPTURE(in_background);
        const TemporaryDirectory directory;
        const std::string run = directory / "run";
        Process process(w.train(run, saves(in_background, 1) + endless),
                        {.bound_by_permissions = true});
        REQUIRE(process.wait_until([&] { return !list_checkpoints(run).empty(); }));
        fs::permissions(run, fs::perms::owner_write, fs::perm_options::remove);
        REQUIRE(process.wait_until([&] { return contains(process.err(), goes_on); }));
        CAPTURE(process.err());
        // The second one if the checkpoint had been begun by then
        CHECK((contains(process.err(), "cannot make the folder " + run + "/step-") ||
               contains(process.err(), "cannot write the checkpoint " + run + "/step-")));
        CHECK(contains(process.err(), ": Permission denied; "));
        const std::vector<int64_t> before = whole_checkpoints(run);
        REQUIRE(before.size() >= 1);
        fs::permissions(run, fs::perms::owner_write, fs::perm_options::add);
        REQUIRE(process.wait_until([&] { return newest_step(run) > before.front(); }));
        process.signal(SIGTERM);
        check_stopped(process.finish());
        whole_checkpoints(run);
    }
}

TEST_CASE("a disk that does not answer stops no step before the next checkpoint is due", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run", disk = directory / "disk";
    write(disk, "wait");
    Process process(w.train(run, saves(true, 0) + endless), faulty("FAULTY_DISK=" + disk));
    REQUIRE(process.wait_for_step(8));
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    CHECK(whole_checkpoints(run).empty());
    CHECK_FALSE(contains(process.out(), "step 9/"));
    CHECK_FALSE(contains(process.err(), "has waited"));
    fs::remove(disk);
    REQUIRE(process.wait_for_step(20));
    process.signal(SIGTERM);
    const Outcome outcome = check_stopped(process.finish());
    CHECK(contains(outcome.err,
                   "warning: the checkpoint of step 8 was due before that of step 4 was written, "
                   "so training has waited for "));
    CHECK(contains(outcome.err,
                   " s: raise checkpoint.every, or write to a faster disk; this is said once\n"));
    const std::vector<int64_t> saved = whole_checkpoints(run);
    for (const int64_t step : {4, 8, 12, 16})
        CHECK(std::find(saved.begin(), saved.end(), step) != saved.end());
}

TEST_CASE("a second signal while a checkpoint is written leaves the one before it whole", "[cli]") {
    const Workplace& w = Workplace::get();
    for (const bool in_background : {false, true}) {
        CAPTURE(in_background);
        const TemporaryDirectory directory;
        const std::string run = directory / "run", disk = directory / "disk";
        const Arguments options = saves(in_background, 0) + endless;
        check_succeeds(train_gpt_with(w.train(run, options + Arguments{"--stop-at", "4"})));
        Process process(w.train(run, options + Arguments{"--set", "checkpoint.every=0"}),
                        faulty("FAULTY_DISK=" + disk));
        REQUIRE(process.wait_for_step(6));
        write(disk, "wait");
        process.signal(SIGTERM);
        REQUIRE(process.wait_until([&] {
            const auto names = names_in(run);
            return std::any_of(names.begin(), names.end(),
                               [](const std::string& name) { return name.ends_with(".tmp"); });
        }));
        process.signal(SIGTERM);
        CHECK(process.finish().code == 3);
        CHECK(whole_checkpoints(run) == std::vector<int64_t>{4});
        const Outcome resumed =
            check_succeeds(train_gpt_with(w.train(run, options + Arguments{"--stop-at", "5"})));
        CHECK(contains(resumed.out, "resuming from " + run + "/" + step_folder(4)));
        CHECK(checkpoints_in(run) == std::vector<int64_t>{4, 5});
    }
}

TEST_CASE("a clock that jumps ends nothing and changes no byte", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    const Surroundings jumping = faulty("FAULTY_CLOCK=100000000");
    const Arguments options{"--set", "checkpoint.every=4", "--set", "schedule.max_minutes=60"};
    for (const char* stop : {"7", "12"})
        check_succeeds(
            train_gpt_with(w.train(run, options + Arguments{"--stop-at", stop}), jumping));
    check_same_state(finished_run(), run, 12);
    check_succeeds(train_gpt_with({"verify", run}, jumping));
    check_succeeds(train_gpt_with({"report", run}, jumping));
}
