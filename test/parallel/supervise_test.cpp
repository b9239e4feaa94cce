// What a supervised job does when it loses a host: the real program, on CPUs.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
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
    Arguments arguments = train(
        run, Arguments{"--set", "batch.tokens_per_step=1536", "--set",
                       concat("schedule.steps=", steps), "--set", "checkpoint.every=10", "--set",
                       "parallel.sums=exact", "--set", "evaluation.max_tokens=128", "--set",
                       "data.val="} +
                 more);
    arguments.erase(arguments.begin());  // the program
    return arguments;
}

/// The events of a job, by name.
std::vector<Json> events_of(const fs::path& run, const std::string& name) {
    std::vector<Json> events;
    std::ifstream file(run / "supervise.jsonl");
    for (std::string line; std::getline(file, line);) {
        const Json json = Json::parse(line);
        if (json.at("event") == name) events.push_back(json);
    }
    return events;
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

/// Checks that a job has ended on so many ranks with the bits of undisturbed runs: the weights are
/// those of a run on 6 ranks, and all files those of a run on as many ranks as it has ended on.
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
};

/// Runs a job, cuts one of its two hosts after a random step, and checks how it continues. Returns
/// the seconds from the cut to the first step after it.
double cut_a_job(const Hosts& hosts, const Cut& cut) {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    Job job(run, hosts.supervise(cut.spare ? 3 : 2, cut.spare ? 1 : 0, {"--no-selfcheck"}) +
                     run_arguments(run));
    const int64_t step = random_int(3, steps - 30);
    CAPTURE(cut.host, cut.cable, cut.spare, step);
    REQUIRE(job.wait_until([&] { return last_step(run) >= step; }));
    job.mark();
    if (cut.cable)
        dynamic_cast<const NetworkHosts&>(hosts).cut_cable(cut.host);
    else
        hosts.kill(cut.host);
    // The last step of the first start may still be in the metrics until the second one begins.
    REQUIRE(job.wait_until([&] { return starts_of(run) == 2; }));
    const int64_t resumed = last_step(run);
    REQUIRE(job.wait_until([&] { return last_step(run) > resumed; }));
    const double seconds = job.seconds_since_mark();
    const ProgramResult result = job.finish();
    INFO(result.output);
    CHECK(result.exit_code == 0);
    const std::vector<Json> starts = events_of(run, "ranks_start");
    REQUIRE(starts.size() == 2);
    CHECK(starts[0].at("ranks") == 6);
    CHECK(starts[1].at("ranks") == (cut.spare ? 6 : 3));
    CHECK(events_of(run, "host_out").at(0).at("host") == Hosts::name(cut.host));
    check_gone(run);
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

TEST_CASE("hosts with a network: a job that loses one of them continues by itself, to the same bits",
          "[supervise][.][long]") {
    for (const Cut& cut : {Cut{.host = 0, .cable = true}, Cut{.host = static_cast<int>(random_int(0, 1))},
                           Cut{.host = 1, .cable = true, .spare = true}}) {
        const NetworkHosts hosts(3);
        if (hosts.skip()) return;
        cut_a_job(hosts, cut);
    }
}

// SUPERVISE_CUTS: how many; SUPERVISE_SPARE=1: with a third host as a spare
TEST_CASE("measure: seconds from a host's loss to the next step", "[.supervise-cuts]") {
    const auto number = [](const char* name, int otherwise) {
        const char* const text = std::getenv(name);
        return text ? std::atoi(text) : otherwise;
    };
    const bool spare = number("SUPERVISE_SPARE", 0) != 0;
    for (int i = 0; i < number("SUPERVISE_CUTS", 1); ++i) {
        const NetworkHosts hosts(3);
        if (hosts.skip()) return;
        const Cut cut{.host = i % 2, .cable = i / 2 % 2 == 1, .spare = spare};
        const double seconds = cut_a_job(hosts, cut);
        std::printf("cut %d: %s of host %c%s: %.2f s\n", i + 1,
                    cut.cable ? "cable" : "processes", 'a' + cut.host, spare ? ", a spare" : "",
                    seconds);
        std::fflush(stdout);
    }
}
