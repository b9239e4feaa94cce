// What a job of several ranks does when something goes wrong in it: the real program under mpirun,
// on CPUs. No case can hang: a job that does not end is ended at its deadline, and its exit code
// says so.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>
#include <sys/resource.h>
#include <unistd.h>

#include "dataloader/shard.h"
#include "test/catch.h"
#include "test/file_difference.h"
#include "test/parallel/failing_job.h"
#include "test/parallel/ranks.h"
#include "test/parallel/two_nodes.h"
#include "test/random.h"
#include "test/text.h"
#include "training/files/checkpoint.h"

using namespace train_gpt;
using namespace train_gpt::failing_job;

// ---- Ranks that die, hang or fail ---------------------------------------------------------------

TEST_CASE(
    "a rank that is killed ends the job with a line that names it, and the job resumes from whole "
    "checkpoints",
    "[failure]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    std::vector<int> ends{SIGKILL, SIGSEGV, SIGABRT};  // as the system, or a fault of the program
    std::shuffle(ends.begin(), ends.end(), test_rng());
    for (const int rank : {0, 1, 2}) {
        const int number = ends[static_cast<size_t>(rank)];
        CAPTURE(rank, number);
        FailingJob job(3, run);
        REQUIRE(job.wait_for_checkpoint());
        REQUIRE(job.wait_for_step(last_step(run) + random_int(5, 12)));
        REQUIRE(job.signal(rank, number));
        check_failed(job, run, concat("rank ", rank, " \\(host [^)]+\\) is dead: ", last_words));
    }
    check_resumes(3, run);
}

namespace {

void check_stopped_rank(int rank) {
    CAPTURE(rank);
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(3, run);
    REQUIRE(job.wait_for_step(random_int(5, 12)));
    REQUIRE(job.signal(rank, SIGSTOP));
    check_hung(job, run, rank, usual_launcher());
    newest_whole_checkpoint(run);
}

}  // namespace

TEST_CASE("a rank that is stopped ends the job within the timeout", "[failure]") {
    check_stopped_rank(2);
}

TEST_CASE("a rank that is stopped for less than the timeout only makes the others wait",
          "[failure]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    const int rank = static_cast<int>(random_int(0, 2));
    CAPTURE(rank);
    FailingJob job(3, run, {"--set", concat("parallel.timeout_seconds=", timeout + grace)});
    REQUIRE(job.wait_for_step(random_int(5, 12)));
    REQUIRE(job.signal(rank, SIGSTOP));
    std::this_thread::sleep_for(std::chrono::seconds(3));
    REQUIRE(job.signal(rank, SIGCONT));
    REQUIRE(job.wait_for_step(last_step(run) + 5));
    REQUIRE(job.signal(0, SIGUSR1));
    check_saved(job, run, "SIGUSR1");
    newest_whole_checkpoint(run);
}

TEST_CASE("no rank outlives mpirun that is killed", "[failure]") {
    if (skip_without_mpirun()) return;
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(run, mpirun(3) + train(run));
    REQUIRE(job.wait_for_step(random_int(5, 12)));
    REQUIRE(job.signal(-1, SIGKILL));
    CHECK(job.finish().exit_code == 128 + SIGKILL);
    check_gone(run);
    newest_whole_checkpoint(run);
}

TEST_CASE("any rank that is stopped ends the job within the timeout", "[failure][.][long]") {
    for (const int rank : {0, 1}) check_stopped_rank(rank);
}

namespace {

/// A shard of eight steps' windows, one of which has a token that the model does not know.
std::string bad_shard(const TemporaryDirectory& directory) {
    constexpr int64_t T = 32, windows = 8 * 16;
    std::vector<uint32_t> tokens(windows * T + 1);
    for (uint32_t& token : tokens) token = static_cast<uint32_t>(random_int(0, 255));
    tokens[static_cast<size_t>(random_int(0, windows - 1) * T + random_int(1, T - 1))] = 999;
    ShardWriter writer(directory.path(), "bad", 1000, std::ssize(tokens));
    writer.append(tokens);
    return writer.finish().at(0).path.string();
}

const std::string bad_data =
    "rank [0-2] \\(host [^)]+\\) failed: [^\n]*bad_000000.bin holds token id 999 ";

}  // namespace

TEST_CASE("one rank that reads bad data ends the job with the reason", "[failure]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(3, run, {"--set", "data.train=" + bad_shard(directory)});
    check_failed(job, run, bad_data);
    CHECK(last_step(run) < 8);
}

TEST_CASE("one rank that reads bad data in an evaluation ends the job with the reason",
          "[failure][.][long]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    check_succeeds(launch(3) + train(run, {"--stop-at", "4"}));
    FailingJob job(3, run,
                   {"--set", "data.val=" + bad_shard(directory), "--set", "evaluation.max_tokens=0",
                    "--set", "evaluation.every=6"});
    check_failed(job, run, bad_data);
    CHECK(last_step(run) == 6);
    CHECK(newest_whole_checkpoint(run) == 4);
}

// ---- Signals ------------------------------------------------------------------------------------

TEST_CASE("ranks agree on the step after which they stop when one of them gets a signal",
          "[failure]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(3, run, {"--set", "checkpoint.every=0"});
    REQUIRE(job.wait_for_step(random_int(3, 12)));
    // As with one rank, the exit code says whether it was Ctrl-C.
    const bool ctrl_c = random_int(0, 1);
    REQUIRE(job.signal(1, ctrl_c ? SIGINT : SIGUSR1));
    check_saved(job, run, "a signal to another rank", ctrl_c ? 130 : 75);
    CHECK(newest_whole_checkpoint(run) == last_step(run));
}

TEST_CASE("a signal to one rank during a save or an evaluation ends the job after a checkpoint",
          "[failure][.][long]") {
    // A model that takes longer to be written, or to be evaluated, than to be trained for a step.
    const Arguments larger{"--set", "model.n_embd=128", "--set", "model.vocab_size=8000"};
    for (const int rank : {0, 2}) {
        CAPTURE(rank);
        const TemporaryDirectory directory;
        const std::string reason = rank == 0 ? "SIGUSR1" : "a signal to another rank";
        {
            const fs::path run = directory / "saving";
            FailingJob job(3, run, larger + Arguments{"--set", "checkpoint.every=2"});
            const int64_t step = 2 * random_int(1, 4);
            char name[32];
            std::snprintf(name, sizeof name, "step-%08d.tmp", static_cast<int>(step));
            REQUIRE(job.wait_until([&] { return fs::exists(run / name); }));
            REQUIRE(job.signal(rank, SIGUSR1));
            check_saved(job, run, reason);
            CHECK(newest_whole_checkpoint(run) >= step);
            CHECK(newest_whole_checkpoint(run) == last_step(run));
        }
        {
            const fs::path run = directory / "evaluating";
            FailingJob job(
                3, run,
                larger + Arguments{"--set", "evaluation.every=2", "--set",
                                   "evaluation.max_tokens=30000", "--set", "checkpoint.every=0"});
            const int64_t step = 2 * random_int(1, 3);
            REQUIRE(job.wait_for_step(step));  // after which it is evaluated
            REQUIRE(job.signal(rank, SIGUSR1));
            check_saved(job, run, reason);
            CHECK(newest_whole_checkpoint(run) == last_step(run));
        }
    }
}

TEST_CASE("mpirun passes SIGUSR1 on, and the job ends after a checkpoint", "[failure][.][long]") {
    if (skip_without_mpirun()) return;
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(3, run);
    REQUIRE(job.wait_for_step(random_int(3, 12)));
    REQUIRE(job.signal(-1, SIGUSR1));
    check_saved(job, run, "SIGUSR1");
    check_resumes(3, run);
}

TEST_CASE("SIGTERM to mpirun ends the job and leaves whole checkpoints", "[failure]") {
    if (skip_without_mpirun()) return;
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(3, run);
    REQUIRE(job.wait_for_checkpoint());
    REQUIRE(job.wait_for_step(random_int(5, 12)));
    REQUIRE(job.signal(-1, SIGTERM));
    const ProgramResult result = job.finish();
    INFO(result.output);
    CHECK(result.exit_code > 0);
    CHECK(result.seconds < timeout + grace);
    check_gone(run);
    newest_whole_checkpoint(run);
}

TEST_CASE("SIGTERM to mpirun ends the job after a checkpoint if mpirun leaves the time",
          "[failure][.][long]") {
    if (skip_without_mpirun()) return;
    // Open MPI waits so long before it hands the signal on, and again before it kills; it reads no
    // output meanwhile, and what a terminal takes is little.
    constexpr int seconds = 4;
    const Environment patience{{"OMPI_MCA_odls_base_sigkill_timeout", std::to_string(seconds)}};
    const Arguments quiet{"--set", "log.every=1000000", "--set", "checkpoint.every=0"};
    const Arguments evaluating{"--set", "evaluation.every=1", "--set",
                               "evaluation.max_tokens=30000"};
    const Arguments saving{"--set", "checkpoint.every=1"};
    for (const Arguments& what : {Arguments{}, evaluating, saving}) {
        const TemporaryDirectory directory;
        const fs::path run = directory / "run";
        FailingJob job(3, run, quiet + what, patience);
        REQUIRE(job.wait_until([&] { return fs::exists(run / "metrics.jsonl"); }));
        std::this_thread::sleep_for(
            std::chrono::milliseconds(random_int(300, 600)));  // in a step, or in what follows it
        REQUIRE(job.signal(-1, SIGTERM));
        const ProgramResult result = job.finish();
        INFO(result.output);
        CHECK(result.exit_code >= 0);  // mpirun's own, which is 1
        CHECK(result.seconds < 2 * seconds + grace);
        CHECK(count(result.output, "train_gpt: ") == 0);
        const int64_t saved = newest_whole_checkpoint(run);
        CHECK(contains(without_signal_notes(result.output),
                       concat("SIGTERM: step ", saved, " of 1000000 is saved in ", run.string(),
                              "; the same command resumes from there")));
        check_gone(run);
    }
}

TEST_CASE("a second signal ends a rank immediately, and so the job", "[failure][.][long]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(3, run, {"--set", concat("parallel.timeout_seconds=", timeout + grace)});
    REQUIRE(job.wait_for_step(random_int(5, 12)));
    REQUIRE(job.signal(2, SIGSTOP));  // so that the first signal has no effect
    REQUIRE(job.signal(1, SIGTERM));
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // two that come at once are one
    REQUIRE(job.signal(1, SIGTERM));
    check_failed(job, run, concat("rank 1 \\(host [^)]+\\) is dead: ", last_words));
    newest_whole_checkpoint(run);
}

TEST_CASE("all ranks stop after the same step when the time is up", "[failure]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    {
        FailingJob job(3, run, {"--set", "schedule.max_minutes=0.01"});
        check_saved(job, run, "schedule.max_minutes have passed");
    }
    CHECK(newest_whole_checkpoint(run) == last_step(run));
}

// ---- Weights, disks and data --------------------------------------------------------------------

TEST_CASE(
    "a gradient that is not finite stops all ranks with one sentence and the last good weights",
    "[failure]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(3, run, {"--set", "optimizer.learning_rate=1e30"});
    const ProgramResult result = job.finish();
    INFO(result.output);
    CHECK(result.exit_code == 1);
    CHECK(count(result.output, "train_gpt: ") == 1);
    CHECK(std::regex_search(
        result.output,
        std::regex(
            "is not finite \\(first in [a-z0-9_.]+, in micro-batch [1-9][0-9]* of [0-9]+, on "
            "rank [0-2]\\)")));
    const int64_t saved =
        newest_whole_checkpoint(run);  // which never holds weights that are not finite
    CHECK(contains(result.output,
                   concat("train_gpt: the gradient of step ", saved + 1, " is not finite")));
    CHECK(contains(result.output,
                   concat("; step ", saved, " of 1000000 is saved in ", run.string())));
    check_gone(run);
}

TEST_CASE(
    "a disk that is full for one rank is reported, training continues, and space that is freed is "
    "used",
    "[failure]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(3, run);
    REQUIRE(job.wait_for_step(1));
    const auto limit = [&](rlim_t bytes) {
        const rlimit wanted{bytes, RLIM_INFINITY};
        for (const Process& process : processes_of(run))
            if (process.rank == 1)
                return ::prlimit(process.pid, RLIMIT_FSIZE, &wanted, nullptr) == 0;
        return false;
    };
    REQUIRE(limit(1000));
    REQUIRE(job.wait_for_step(last_step(run) + 9));  // after a checkpoint was due
    const auto before = list_checkpoints(run);
    REQUIRE(limit(RLIM_INFINITY));
    REQUIRE(job.wait_until([&] {
        const auto now = list_checkpoints(run);
        return !now.empty() && now != before;
    }));
    REQUIRE(job.signal(0, SIGUSR1));
    const ProgramResult result = job.finish();
    INFO(result.output);
    CHECK(result.exit_code == 75);
    CHECK(contains(result.output, "is not saved: rank 1: cannot write"));
    CHECK(contains(result.output,
                   "; training continues, and the next checkpoint is written when it is due"));
    CHECK(contains(result.output, "the same command resumes from there"));
    newest_whole_checkpoint(run);
    check_gone(run);
}

TEST_CASE("a rank that cannot start says why in one sentence, and all ranks end", "[failure]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    const auto check_refused = [&](const Arguments& command, const Arguments& parts) {
        FailingJob job(run, command);
        const ProgramResult result = job.finish();
        INFO(result.output);
        CHECK(result.exit_code > 0);
        CHECK(result.seconds < timeout + grace);
        CHECK(count(result.output, "train_gpt: ") == 1);
        for (const std::string& part : parts) CHECK(contains(result.output, part));
        CHECK(last_step(run) == 0);
        check_gone(run);
    };
    SECTION("its data is missing") {
        const std::string missing = "data.train=" + (directory / "missing_*.bin");
        check_refused(launch(3) + train_with_one_different(run, 1, {"--set", missing}),
                      {"train_gpt: rank 1 (host ", directory / "missing_*.bin"});
    }
    SECTION("its configuration differs") {
        check_refused(launch(3) + train_with_one_different(run, 2, {"--set", "seed=77"}),
                      {"train_gpt: the ranks do not agree", "\n  seed: ", "77 on rank 2 (",
                       "ranks 0 (", ", 1 ("});
    }
    SECTION("its configuration is wrong") {
        check_refused(launch(3) + train_with_one_different(run, 1, {"--set", "model.n_layer=0"}),
                      {"train_gpt: rank 1: ", "model.n_layer"});
    }
    SECTION("the ranks of a host have too little memory to share") {
        const Arguments small{"unshare",
                              "--mount",
                              "sh",
                              "-c",
                              "mount -t tmpfs -o size=64k none /dev/shm && exec \"$@\"",
                              "sh"};
        if (run_program(small + Arguments{"true"}).exit_code != 0) {
            std::printf("skipped: a small /dev/shm, since mounts are not permitted here\n");
            return;
        }
        FailingJob job(run, small + launch(3, Launcher::own) + train(run));
        check_failed(job, run,
                     "rank [0-2] \\(host [^)]+\\): ranks on one host cannot share [0-9]+ KiB of "
                     "memory each: No space left on device; see `df /dev/shm` \\(containers: "
                     "--shm-size=1g\\)");
    }
}

namespace {

/// Whether the process has a handler for the signal.
bool catches(pid_t process, int number) {
    const std::string status =
        read_of_process(fs::path("/proc") / std::to_string(process) / "status");
    const size_t at = status.find("SigCgt:\t");
    return at != std::string::npos &&
           (std::stoull(status.substr(at + 8, 16), nullptr, 16) >> (number - 1) & 1) != 0;
}

}  // namespace

TEST_CASE("a signal to one rank at any moment of a start ends all ranks with its code",
          "[failure][launch]") {
    const TemporaryDirectory directory;
    std::vector<Launcher> all = launchers();
    for (size_t i = 0; i < 2 * all.size(); ++i) {
        const Launcher launcher = all[i % all.size()];
        const int rank = static_cast<int>(random_int(0, 2));
        const int number = random_int(0, 1) ? SIGINT : SIGTERM;
        const int64_t milliseconds = random_int(0, 600);
        CAPTURE(name_of(launcher), rank, number, milliseconds);
        const fs::path run = directory / std::to_string(i);
        FailingJob job(3, run, {}, {}, launcher);
        REQUIRE(job.wait_until([&] {
            const auto processes = processes_of(run);
            return std::ranges::count_if(processes, [&](const Process& process) {
                       return process.rank >= 0 && catches(process.pid, number);
                   }) == 3;
        }));
        std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
        REQUIRE(job.signal(rank, number));
        const ProgramResult result = job.finish();
        INFO(result.output);
        CHECK(result.exit_code == (number == SIGINT ? 130 : 75));
        CHECK((contains(result.output, ": ended with nothing to save; the same command starts") ||
               contains(result.output, "saving, then ending")));
        check_gone(run);
    }
}

TEST_CASE("a start that fails on every rank is reported in one sentence", "[failure][.][long]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    const auto check_refused = [&](const Arguments& more, const std::string& reason) {
        const ProgramResult result = run_program(launch(3) + train(run, more), surroundings);
        INFO(result.output);
        CHECK(result.exit_code > 0);
        CHECK(count(result.output, "train_gpt: ") == 1);
        CHECK(contains(result.output, reason));
    };
    check_refused({"--set", "data.train=" + (directory / "missing_*.bin")},
                  directory / "missing_*.bin");
    check_refused({"--set", "batch.micro_batch=8"}, "2 micro-batches cannot feed 3 ranks");
    FailingJob first(2, run);
    REQUIRE(first.wait_for_step(5));
    check_refused({}, "another run is writing into " + run.string());
    REQUIRE(first.signal(0, SIGUSR1));
    check_saved(first, run, "SIGUSR1");
}

// ---- Two hosts ----------------------------------------------------------------------------------

namespace {

std::vector<double> losses_of(const fs::path& run) {
    std::ifstream lines(run / "metrics.jsonl");
    std::vector<double> losses;
    for (std::string line; std::getline(lines, line);)
        losses.push_back(SortedJson::parse(line).at("loss"));
    return losses;
}

}  // namespace

TEST_CASE("a cable that is cut ends the ranks on both of its sides within the timeout",
          "[failure]") {
    const TwoNodes nodes;
    if (nodes.skip_mpirun()) return;
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(run, nodes.mpirun_on_both(4) + train(run));
    REQUIRE(job.wait_for_step(random_int(5, 12)));
    nodes.cut();
    job.mark();
    check_gone(run, [](const Process& process) { return process.rank >= 0; });
    CHECK(job.seconds_since_mark() < timeout + grace);
    // mpirun itself waits for its daemon on the other side, at times as long as TCP does.
    nodes.mend();
    job.mark();
    check_failed(job, run, "rank [23] \\(host node-b\\) is hung: " + last_words);
    newest_whole_checkpoint(run);
}

TEST_CASE("a rank of another host that is killed ends the job", "[failure][.][long]") {
    const TwoNodes nodes;
    if (nodes.skip_mpirun()) return;
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    for (const int rank : {0, 3}) {
        FailingJob job(run, nodes.mpirun_on_both(4) + train(run));
        REQUIRE(job.wait_for_step(last_step(run) + random_int(5, 12)));
        REQUIRE(job.signal(rank, SIGKILL));
        check_failed(job, run,
                     concat("rank ", rank, " \\(host node-", rank < 2 ? "a" : "b",
                            "\\) is dead: ", last_words));
    }
    newest_whole_checkpoint(run);
}

TEST_CASE("the result depends on neither where ranks are nor how slow the network is",
          "[failure][.][long]") {
    const TwoNodes nodes;
    if (nodes.skip_mpirun()) return;
    const TemporaryDirectory directory;
    const auto trained = [&](const char* name, const Arguments& launch) {
        const fs::path run = directory / name;
        check_succeeds(launch + train(run, {"--stop-at", "12"}));
        REQUIRE(newest_whole_checkpoint(run) == 12);
        return run;
    };
    const auto check_same = [](const fs::path& a, const fs::path& b) {
        CHECK(file_difference(list_checkpoints(a).front() / "model.safetensors",
                              list_checkpoints(b).front() / "model.safetensors") == "");
        CHECK(losses_of(a) == losses_of(b));
    };
    // Two numbers have one sum; of four, those of a node are added first.
    check_same(trained("one-2", mpirun(2)), trained("two-2", nodes.mpirun_on_both(2)));
    const fs::path fast = trained("two-4", nodes.mpirun_on_both(4));
    const std::vector<double> expected = losses_of(trained("one-4", mpirun(4))),
                              losses = losses_of(fast);
    REQUIRE(expected.size() == 12);
    REQUIRE(losses.size() == 12);
    for (size_t i = 0; i < losses.size(); ++i)
        CHECK(losses[i] == Approx(expected[i]).epsilon(1e-6));

    const std::string how = nodes.slow_down();
    if (how.empty()) {
        std::printf(
            "skipped: ranks with a slow network between them, since tc has neither netem nor tbf "
            "here\n");
        return;
    }
    std::printf("a slow network: %s\n", how.c_str());
    check_same(fast, trained("slow-4", nodes.mpirun_on_both(4)));
}
