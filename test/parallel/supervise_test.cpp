// What a supervised job does when it loses a host: the real program, on CPUs.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "test/catch.h"
#include "test/file_difference.h"
#include "test/parallel/supervised_job.h"
#include "test/random.h"
#include "test/text.h"
#include "training/files/checkpoint.h"

using namespace train_gpt;
using namespace train_gpt::supervised_job;

namespace {

constexpr int steps = 120;

/// The arguments of a run of so many steps, of twelve micro-batches each.
Arguments run_arguments(const fs::path& run, const Arguments& more = {}) {
    Arguments arguments =
        train(run, Arguments{"--set", "batch.tokens_per_step=1536", "--set",
                             concat("schedule.steps=", steps), "--set", "checkpoint.every=10",
                             "--set", "parallel.sums=exact", "--set", "evaluation.max_tokens=128",
                             "--set", "data.val="} +
                       more);
    arguments.erase(arguments.begin());  // the program
    return arguments;
}

/// Waits until the condition holds, and shows what the job has printed if it ends without it.
void require_while_running(FailingJob& job, const std::function<bool()>& condition) {
    if (job.wait_until(condition)) return;
    FAIL("the job has ended: " << job.finish().output);
}

/// The events of a job, by name.
std::vector<SortedJson> events_of(const fs::path& run, const std::string& name) {
    std::vector<SortedJson> events;
    std::ifstream file(run / "supervise.jsonl");
    for (std::string line; std::getline(file, line);) {
        const SortedJson json = SortedJson::parse(line);
        if (json.at("event") == name) events.push_back(json);
    }
    return events;
}

/// Checks that what the supervisor did after the run had begun is part of the run's history, in
/// order, and that the history holds.
void check_history(const fs::path& run) {
    const ProgramResult verified = run_program({binary(), "verify", run});
    INFO(verified.output);
    CHECK(verified.exit_code == 0);
    std::vector<SortedJson> expected, found;
    bool begun = false;
    std::ifstream events(run / "supervise.jsonl"), history(run / "history.jsonl");
    for (std::string line; std::getline(events, line);)
        if (begun || SortedJson::parse(line).at("event") == "ranks_end") {
            begun = true;
            expected.push_back(SortedJson::parse(line));
        }
    for (std::string line; std::getline(history, line);) {
        SortedJson event = SortedJson::parse(line);
        event.erase("previous");
        for (const char* name : {"ranks_start", "ranks_end", "host_out", "supervisor_end"})
            if (event.at("event") == name) found.push_back(event);
    }
    CHECK(found == expected);
}

size_t starts_of(const fs::path& run) {
    return occurrences(read(run / "history.jsonl"), "\"event\":\"start\"");
}

/// An undisturbed run on so many ranks.
const fs::path& undisturbed(int ranks) {
    static const TemporaryDirectory directory;
    static std::map<int, fs::path> runs;
    if (!runs.contains(ranks)) {
        const fs::path run = directory / std::to_string(ranks);
        check_succeeds(launch(ranks) + Arguments{binary()} + run_arguments(run));
        runs[ranks] = run;
    }
    return runs.at(ranks);
}

/// Checks that a job has ended on so many ranks with the bits of undisturbed runs: all files are
/// those of a run on as many ranks as it has ended on, and the weights also those of a run on as
/// many as it began with.
void check_bits(const fs::path& run, int ranks) {
    const fs::path last = checkpoint_path(run, steps);
    REQUIRE(fs::exists(last));
    for (const char* file : {"model.safetensors", "grids.safetensors"})
        CHECK(file_difference(checkpoint_path(undisturbed(6), steps) / file, last / file) == "");
    int compared = 0;
    for (const auto& entry : fs::directory_iterator(checkpoint_path(undisturbed(ranks), steps))) {
        if (entry.path().extension() != ".safetensors") continue;
        CAPTURE(entry.path().string());
        CHECK(file_difference(entry.path(), last / entry.path().filename()) == "");
        ++compared;
    }
    CHECK(compared == 2 + ranks);
}

struct Cut {
    int host = 0;
    bool cable = false;  // else all processes of the host are killed
    bool spare = false;
    bool selfcheck = false;  // else hosts are only asked whether they answer
};

const Arguments quick_selfcheck{"--selfcheck", "--max-bytes 65536 --tolerance 100"};

/// Runs a job, cuts one of its two hosts after a random step, and checks how it continues. Returns
/// the seconds from the cut to the first step after it.
double cut_a_job(const Hosts& hosts, const Cut& cut) {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(run,
                   hosts.supervise(cut.spare ? 3 : 2, cut.spare ? 1 : 0,
                                   cut.selfcheck ? quick_selfcheck : Arguments{"--no-selfcheck"}) +
                       run_arguments(run));
    const int64_t step = random_int(3, steps - 30);
    CAPTURE(cut.host, cut.cable, cut.spare, step);
    require_while_running(job, [&] { return last_step(run) >= step; });
    job.mark();
    if (cut.cable)
        dynamic_cast<const NetworkHosts&>(hosts).cut_cable(cut.host);
    else
        hosts.kill(cut.host);
    // The last step of the first start may still be in the metrics until the second one begins.
    require_while_running(job, [&] { return starts_of(run) == 2; });
    const int64_t resumed = last_step(run);
    require_while_running(job, [&] { return last_step(run) > resumed; });
    const double seconds = job.seconds_since_mark();
    const ProgramResult result = job.finish();
    INFO(result.output);
    CHECK(result.exit_code == 0);
    const std::vector<SortedJson> starts = events_of(run, "ranks_start");
    REQUIRE(starts.size() == 2);
    CHECK(starts[0].at("ranks") == 6);
    CHECK(starts[1].at("ranks") == (cut.spare ? 6 : 3));
    CHECK(events_of(run, "host_out").at(0).at("host") == Hosts::name(cut.host));
    check_gone(run);
    check_history(run);
    check_bits(run, cut.spare ? 6 : 3);
    hosts.mend(cut.host);
    return seconds;
}

}  // namespace

TEST_CASE("a job that loses a host continues by itself on fewer ranks, to the same bits",
          "[supervise]") {
    const NamedHosts hosts;
    cut_a_job(hosts, {.host = static_cast<int>(random_int(0, 1))});
}

TEST_CASE(
    "hosts with a network: a job that loses one of them continues by itself, to the same bits",
    "[supervise][.][long]") {
    for (const Cut& cut :
         {Cut{.host = 0, .cable = true}, Cut{.host = static_cast<int>(random_int(0, 1))},
          Cut{.host = 1, .cable = true, .spare = true}}) {
        const NetworkHosts hosts(3);
        if (hosts.skip()) return;
        cut_a_job(hosts, cut);
    }
}

// SUPERVISE_CUTS: how many; SUPERVISE_SPARE=1: with a third host as a spare; SUPERVISE_SELFCHECK=1:
// with selfchecks
TEST_CASE("measure: seconds from a host's loss to the next step", "[.supervise-cuts]") {
    const auto number = [](const char* name, int otherwise) {
        const char* const text = std::getenv(name);
        return text ? std::atoi(text) : otherwise;
    };
    const bool spare = number("SUPERVISE_SPARE", 0) != 0,
               selfcheck = number("SUPERVISE_SELFCHECK", 0) != 0;
    for (int i = 0; i < number("SUPERVISE_CUTS", 1); ++i) {
        const NetworkHosts hosts(3);
        if (hosts.skip()) return;
        const Cut cut{
            .host = i % 2, .cable = i / 2 % 2 == 1, .spare = spare, .selfcheck = selfcheck};
        const double seconds = cut_a_job(hosts, cut);
        std::printf("cut %d: %s of host %c%s: %.2f s\n", i + 1, cut.cable ? "cable" : "processes",
                    'a' + cut.host, spare ? ", a spare" : "", seconds);
        std::fflush(stdout);
    }
}

// ---- Jobs that lose nothing ---------------------------------------------------------------------

namespace {

/// A tiny run that goes on until it is ended.
Arguments endless(const fs::path& run, const Arguments& more = {}) {
    Arguments arguments = train(run, Arguments{"--set", "batch.tokens_per_step=1536"} + more);
    arguments.erase(arguments.begin());
    return arguments;
}

}  // namespace

TEST_CASE("a supervised job begins with selfchecks, and a signal ends it after a checkpoint",
          "[supervise]") {
    const NamedHosts hosts;
    const auto [signal, code] = random_int(0, 1) ? std::pair{SIGINT, 130} : std::pair{SIGTERM, 75};
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(run, hosts.supervise(2, 0, quick_selfcheck) + endless(run),
                   {{"NCCL_DEBUG", "WARN"}});
    require_while_running(job, [&] { return last_step(run) >= 3; });
    for (const Process& process : processes_of(run)) {
        if (process.rank < 0) continue;
        const std::string variables = read_of_process(concat("/proc/", process.pid, "/environ"));
        CHECK(contains(variables, "NCCL_DEBUG=WARN"));
    }
    REQUIRE(job.signal(-1, signal));
    const ProgramResult result = job.finish();
    INFO(result.output);
    CHECK(result.exit_code == code);
    CHECK(contains(result.output, "collectives over 6 ranks"));
    CHECK(contains(read(run / "supervise.log"),
                   concat(" available here to each of ", Hosts::slots, " ranks\n")));
    CHECK(contains(result.output, "the same command resumes from there"));
    CHECK(newest_whole_checkpoint(run) == last_step(run));
    check_gone(run);
    // Whether it is there, the selfcheck, the run
    CHECK(occurrences(hosts.log(), "node-b\n") == 3);
}

TEST_CASE("a job on this machine alone needs no hosts file, and a rank that is killed starts again",
          "[supervise]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(run, Arguments{binary(), "supervise", "--ranks", "2", "--no-selfcheck",
                                  "--threads", "1", "--"} +
                            endless(run, {"--set", "schedule.steps=300"}));
    require_while_running(job, [&] { return last_step(run) >= 3; });
    REQUIRE(job.signal(1, SIGKILL));
    const ProgramResult result = job.finish();
    INFO(result.output);
    CHECK(result.exit_code == 0);
    CHECK(starts_of(run) == 2);
    CHECK(events_of(run, "host_out").empty());
    CHECK(newest_whole_checkpoint(run) == 300);
    CHECK(contains(result.output, "ranks were lost (exit code 1): rank 1 (host "));
    CHECK(contains(read(run / "supervise.log"), "supervise: ended with exit code 0\n"));
    check_history(run);
}

TEST_CASE("ranks whose supervisor is killed save a checkpoint and end", "[supervise]") {
    const NamedHosts hosts;
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(run, hosts.supervise(2, 0, {"--no-selfcheck"}) +
                            endless(run, {"--set", "checkpoint.every=0"}));
    require_while_running(job, [&] { return last_step(run) >= 3; });
    REQUIRE(job.signal(-1, SIGKILL));
    job.finish();
    check_gone(run);
    CHECK(newest_whole_checkpoint(run) == last_step(run));
    const ProgramResult verified = run_program({binary(), "verify", run});
    INFO(verified.output);
    CHECK(verified.exit_code == 0);
}

TEST_CASE("srun starts the ranks in a Slurm allocation", "[supervise]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    // The stand-in starts the program, which follows the options.
    write(directory / "srun",
          "#!/bin/sh\necho \"$*\" >> \"$0.log\"\n"
          "while [ \"${1#--}\" != \"$1\" ]; do shift; done\nexec \"$@\"\n");
    fs::permissions(directory / "srun", fs::perms::owner_all);
    const ProgramResult result =
        run_program(Arguments{binary(), "supervise", "--no-selfcheck", "--port",
                              std::to_string(free_port()), "--"} +
                        endless(run, {"--stop-at", "3"}),
                    {{"PATH", directory.path() + ":" + std::getenv("PATH")},
                     {"SLURM_JOB_ID", "4711"},
                     {"SLURM_JOB_NODELIST", "localhost"},
                     {"SLURM_TASKS_PER_NODE", "2"},
                     {"OMP_NUM_THREADS", "1"}});
    INFO(result.output);
    CHECK(result.exit_code == 0);
    CHECK(newest_whole_checkpoint(run) == 3);
    CHECK(contains(result.output, " on 2 × "));
    CHECK(contains(read(directory / "srun.log"), "--overlap"));
    CHECK(contains(read(directory / "srun.log"), "--nodelist=localhost"));
}

TEST_CASE("errors that a restart cannot mend end a supervised job at once", "[supervise]") {
    const NamedHosts hosts;
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    const auto job = [&](const Arguments& more, const Arguments& options = {}) {
        return run_program(
            hosts.supervise(2, 0, Arguments{"--no-selfcheck"} + options) + endless(run, more),
            surroundings);
    };
    // Before anything starts
    const ProgramResult layers = job({"--set", "model.n_layer=0"});
    INFO(layers.output);
    CHECK(layers.exit_code == 1);
    CHECK(contains(layers.output, "model.n_layer"));
    CHECK_FALSE(fs::exists(run / "supervise.log"));
    // On the ranks: the data are not there
    const ProgramResult data = job({"--set", "data.train=" + (directory / "none_*.bin")});
    INFO(data.output);
    CHECK(data.exit_code == 1);
    CHECK(contains(data.output, "does not start the ranks again, since they would fail again"));
    CHECK(events_of(run, "ranks_start").size() == 1);
    // By `plan`
    const ProgramResult feed = job({"--set", "batch.tokens_per_step=512"});
    INFO(feed.output);
    CHECK(feed.exit_code == 1);
    CHECK(contains(feed.output, "the run cannot start: a step of 4 micro-batches cannot feed 6"));
    CHECK(events_of(run, "ranks_start").size() == 1);
    CHECK(job({"--bogus"}).exit_code == 2);
}

TEST_CASE("a host that does not see the run's folder is refused before the first start",
          "[supervise]") {
    const NamedHosts hosts;
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    write(directory / "enter", concat("#!/bin/sh\nexec unshare -m sh -c 'mount -t tmpfs none ",
                                      directory.path(), " && exec sh -c \"$0\"' \"$2\"\n"));
    fs::permissions(directory / "enter", fs::perms::owner_all);
    if (run_program({directory / "enter", "x", "true"}).exit_code != 0) {
        std::printf("skipped: another host's folder, since mounts are not permitted here\n");
        return;
    }
    write(directory / "hosts", "far slots=1\n");
    const ProgramResult result =
        run_program(Arguments{binary(), "supervise", "--hosts", directory / "hosts", "--ssh",
                              directory / "enter", "--no-selfcheck", "--"} +
                        endless(run),
                    surroundings);
    INFO(result.output);
    CHECK(result.exit_code == 1);
    CHECK(contains(result.output, "host far has started no ranks: the run folder"));
    CHECK(contains(result.output, "put run_dir on storage that all hosts see"));
}

TEST_CASE("supervise refuses what it cannot run, in a sentence", "[supervise]") {
    const TemporaryDirectory directory;
    write(directory / "hosts", "a slots=2\nb slots=2\n");
    write(directory / "none", "# nobody\n");
    write(directory / "local", "localhost slots=2\nb slots=2\n");
    const auto refused = [&](const Arguments& arguments, int code, const std::string& part) {
        const ProgramResult result =
            run_program(Arguments{binary(), "supervise"} + arguments, surroundings);
        INFO(result.output);
        CHECK(result.exit_code == code);
        CHECK(contains(result.output, part));
    };
    const std::string hosts = directory / "hosts";
    refused({"--hosts", hosts}, 2, "supervise needs the command that it runs after --");
    refused({"--hosts", hosts, "--"}, 2, "supervise needs the command that it runs after --");
    refused({"--hosts", hosts, "--", "sample", "x"}, 2,
            "supervise runs `train` alone, and after -- there is \"sample\"");
    refused({"--hosts", hosts, "--", "train", "--help"}, 2, "does not train");
    refused({"--hosts", hosts, "--", "train", "c.json", "--bogus"}, 2, "--bogus");
    refused({"--hosts", hosts, "--spares", "2", "--", "train", "quickstart"}, 2,
            "--spares 2 leaves no host to train on; there are 2 hosts");
    refused({"--hosts", directory / "gone", "--", "train", "quickstart"}, 1,
            "there is no hosts file");
    refused({"--hosts", directory / "none", "--", "train", "quickstart"}, 1, "names no host");
    refused({"--hosts", directory / "local", "--", "train", "quickstart"}, 1,
            "other hosts cannot find localhost by this name");
    refused({"--on-host"}, 1, "is not an order");
}

TEST_CASE("a host on which ranks fail twice without a checkpoint between gets no more of them",
          "[supervise]") {
    const NamedHosts hosts;
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(run, hosts.supervise(2, 0, {"--no-selfcheck", "--backoff", "0.1"}) +
                            endless(run, {"--set", "checkpoint.every=0"}));
    for (const size_t start : {1U, 2U}) {
        require_while_running(job, [&] { return starts_of(run) == start && last_step(run) > 0; });
        REQUIRE(job.signal(static_cast<int>(random_int(3, 5)), SIGKILL));
        // The steps of the last start are in the metrics until the next one begins.
        require_while_running(job, [&] { return starts_of(run) == start + 1; });
    }
    require_while_running(job, [&] { return last_step(run) > 0; });
    REQUIRE(job.signal(-1, SIGTERM));
    const ProgramResult result = job.finish();
    INFO(result.output);
    CHECK(result.exit_code == 75);
    const std::vector<SortedJson> starts = events_of(run, "ranks_start");
    REQUIRE(starts.size() == 3);
    CHECK(starts[1].at("ranks") == 6);
    CHECK(starts[2].at("hosts") == SortedJson{"node-a"});
    CHECK(events_of(run, "host_out").at(0).at("host") == "node-b");
}
