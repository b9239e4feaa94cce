// A storm: jobs are killed with SIGKILL at random moments of starting, training and saving, and
// started again, until they are done. Nothing that was saved may be lost, and in the end a job has
// the bytes of one that nobody disturbed.
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "test/catch.h"
#include "test/file_difference.h"
#include "test/parallel/failing_job.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"
#include "training/files/checkpoint.h"
#include "training/files/history_chain.h"
#include "training/files/history_check.h"

using namespace train_gpt;
using namespace train_gpt::failing_job;

namespace {

template <class T>
T one_of(const std::vector<T>& values) {
    return values[static_cast<size_t>(random_int(0, std::ssize(values) - 1))];
}

Arguments set(const std::vector<std::string>& settings) {
    Arguments arguments;
    for (const std::string& setting : settings) {
        arguments.emplace_back("--set");
        arguments.push_back(setting);
    }
    return arguments;
}

/// The ranks of a start.
struct RanksOfStart {
    int data = 1, zero = 0;
    std::string axis = {};  // "tensor", "pipeline" or "context": of two ranks; empty: none

    int count() const { return data * (axis.empty() ? 1 : 2); }
    std::string name() const {
        std::string text = concat("data ", data, ", ZeRO-", zero);
        if (!axis.empty()) text += ", " + axis + " 2";
        return text;
    }
    Arguments settings() const {
        std::vector<std::string> all{concat("parallel.zero=", zero)};
        if (!axis.empty()) all.push_back("parallel." + axis + "=2");
        return set(all);
    }
};

/// What stays the same in all starts of a run.
struct Plan {
    static constexpr int64_t steps = 80;

    bool exact = random_int(0, 1) == 1;  // then each start may have other data-parallel ranks
    int keep = static_cast<int>(random_int(0, 3));
    RanksOfStart first =
        random_ranks(one_of<std::string>({"", "", "", "", "tensor", "pipeline", "context"}));
    std::vector<std::string> model = [this] {
        std::vector<std::vector<std::string>> models{{}, {"model.family=llama"}};
        if (first.axis.empty()) {
            models.push_back({"optimizer.name=muon"});
            models.push_back(
                {"model.family=qwen3_moe", "model.n_expert=5", "model.n_expert_per_token=2"});
        }
        return one_of(models);
    }();
    std::vector<std::string> others = {
        concat("parallel.sums=", exact ? "exact" : "fp32"),
        concat("checkpoint.keep=", keep),
        concat("checkpoint.every=", random_int(1, 4)),
        concat("precision.dtype=", one_of<std::string>({"fp32", "bf16"})),
        concat("model.vocab_size=", one_of<int>({256, 3000})),
        concat("schedule.steps=", steps),
        "batch.tokens_per_step=384",
        "batch.micro_batch=2",
        "parallel.timeout_seconds=60"};  // longer than a busy disk takes

    static RanksOfStart random_ranks(const std::string& axis) {
        const int data =
            static_cast<int>(axis.empty() ? random_int(1, 3) : 1 + random_int(0, 3) / 3);
        return {data, data > 1 ? static_cast<int>(random_int(0, 3)) : 0, axis};
    }
    RanksOfStart next() const { return exact ? random_ranks(first.axis) : first; }

    Arguments command(const fs::path& run, const RanksOfStart& ranks, Launcher launcher) const {
        const std::string async = one_of<std::string>({"on", "off"});
        const Arguments start = ranks.count() > 1 ? launch(ranks.count(), launcher) : Arguments{};
        return start + train(run, ranks.settings() + set(model) + set(others) +
                                      set({"checkpoint.async=" + async}));
    }
};

std::string described(const Arguments& command) {
    std::string text;
    for (auto at = std::find(command.begin(), command.end(), "train"); at != command.end(); ++at)
        text += (text.empty() ? "" : " ") + *at;
    return text;
}

/// Bytes of all files in a folder that may vanish meanwhile.
uintmax_t bytes_in(const fs::path& folder) {
    uintmax_t bytes = 0;
    std::error_code gone;
    for (fs::directory_iterator entry(folder, gone), end; !gone && entry != end;
         entry.increment(gone)) {
        std::error_code ignored;
        const uintmax_t size = entry->file_size(ignored);
        if (!ignored) bytes += size;
    }
    return bytes;
}

std::vector<int64_t> steps_saved(const fs::path& run) {
    std::vector<int64_t> steps;
    for (const fs::path& path : list_checkpoints(run)) steps.push_back(checkpoint_step(path));
    return steps;
}

/// The unfinished checkpoint that is newer than all complete ones; empty if there is none.
fs::path unfinished(const fs::path& run) {
    fs::path newest, tmp;
    std::error_code gone;
    for (fs::directory_iterator entry(run, gone), end; !gone && entry != end;
         entry.increment(gone)) {
        const std::string name = entry->path().filename();
        if (!name.starts_with("step-")) continue;
        fs::path& of_kind = name.ends_with(".tmp") ? tmp : newest;
        if (name.substr(0, 13) > of_kind.filename().string().substr(0, 13)) of_kind = entry->path();
    }
    const bool is_save = tmp.stem().string() > newest.filename().string();
    return is_save ? tmp : fs::path();
}

/// What a storm did.
struct Tally {
    int64_t kills = 0, runs = 0, in_saves = 0, unkilled = 0;
    std::array<int64_t, 4> quarters{};  // how much of the checkpoint was on the disk
    std::map<std::string, int64_t> victims, meshes;
};

class Storm {
  public:
    explicit Storm(Tally& tally) : tally_(tally) { ++tally.runs; }

    /// Kills starts of the run until it is done, or there were as many kills; then lets it end, and
    /// compares it with an undisturbed run.
    void rage(int64_t kills) {
        while (!done_ && tally_.kills < kills) start_and_kill();
        if (!done_) {
            last_ = plan_.next();
            const Arguments command = plan_.command(run_, last_, usual_launcher());
            CAPTURE(described(command));
            const ProgramResult result = run_program(command, surroundings);
            INFO(result.output);
            REQUIRE(result.exit_code == 0);
            check_output(result.output);
        }
        look();
        REQUIRE(saved_.front() == Plan::steps);
        check_succeeds({binary(), "verify", run_});
        compare();
    }

  private:
    void start_and_kill() {
        last_ = plan_.next();
        const Launcher launcher = one_of<Launcher>(
            mpirun_obstacle().empty() ? std::vector{Launcher::mpirun, Launcher::own}
                                      : std::vector{Launcher::own});
        const Arguments command = plan_.command(run_, last_, launcher);
        const int64_t before = fs::exists(run_ / "metrics.jsonl") ? last_step(run_) : 0;
        const auto kind = random_int(0, 5);
        const std::string aim = kind == 0 ? "a start" : kind < 3 ? "a step" : "a save";
        CAPTURE(tally_.kills, described(command), aim, before, saved_);
        // Ranks that were not killed wait so long for one that was before they all met.
        FailingJob job(run_, command, {{"TRAIN_GPT_JOIN_SECONDS", "10"}});
        std::vector<Process> processes;
        if (kind > 0) {
            job.wait_until([&] {
                std::this_thread::sleep_for(std::chrono::milliseconds(5));
                processes = processes_of(run_);
                return std::ssize(ranks_of(processes)) == last_.count();
            });
            if (kind < 3) {
                const int64_t step = before + random_int(1, 12);
                job.wait_until(
                    [&] { return fs::exists(run_ / "metrics.jsonl") && last_step(run_) >= step; });
                pause(20000);
            } else {
                wait_for_save(job);
            }
        } else {
            pause(800000);
            processes = processes_of(run_);
        }
        // Most of these waits would teach nothing.
        const bool all = kind == 0 && launcher == Launcher::own && random_int(0, 7) > 0;
        const std::string victims = kill(processes, launcher, all);
        const ProgramResult result = job.finish();
        check_gone(run_);
        CAPTURE(victims, result.exit_code, result.output);
        check_output(result.output);
        done_ = result.exit_code == 0;
        if (done_) return;
        look();
        if (victims.empty() || result.exit_code < 0) {
            // A start that a busy machine has kept from its work, or from meeting in time.
            std::printf("ended by itself, or by its deadline:\n%s\n", result.output.c_str());
            ++tally_.unkilled;
            REQUIRE(tally_.unkilled <= 3 + tally_.kills / 20);
            return;
        }
        ++tally_.kills;
        ++tally_.victims[victims];
        ++tally_.meshes[concat(last_.name(), plan_.exact ? ", exact" : "")];
    }

    static void pause(int64_t most) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_int(0, most)));
    }

    std::vector<Process> ranks_of(const std::vector<Process>& processes) const {
        std::vector<Process> ranks;
        for (const Process& process : processes)
            if (process.rank >= 0 || last_.count() == 1) ranks.push_back(process);
        return ranks;
    }

    /// Until some checkpoint has a random share of its bytes.
    void wait_for_save(FailingJob& job) const {
        std::set<fs::path> seen;
        const auto wanted = static_cast<size_t>(random_int(1, 4));
        const auto share = static_cast<uintmax_t>(random_int(0, 99));
        job.wait_until([&] {
            const fs::path folder = unfinished(run_);
            if (folder.empty()) return seen.size() > wanted;
            seen.insert(folder);
            return seen.size() > wanted ||
                   (seen.size() == wanted && bytes_in(folder) * 100 >= share * whole_);
        });
        if (random_int(0, 1)) pause(2000);
    }

    /// Kills one rank, all processes, or the launcher. Says which; empty: there was none any more.
    std::string kill(const std::vector<Process>& processes, Launcher launcher, bool all) const {
        std::vector<pid_t> doomed;
        std::string victims;
        const std::vector<Process> ranks = ranks_of(processes);
        const auto way = all ? 4 : random_int(0, 4);
        if (way == 0 && last_.count() > 1 && launcher == Launcher::mpirun) {
            victims = "mpirun";
            for (const Process& process : processes)
                if (process.rank < 0) doomed.push_back(process.pid);
        } else if (way < 3 && last_.count() > 1 && !ranks.empty()) {
            const Process& rank = one_of(ranks);
            victims = rank.rank == 0 ? "rank 0" : "another rank";
            doomed.push_back(rank.pid);
        } else {
            victims = last_.count() > 1 ? "all processes" : "the only rank";
            for (const Process& process : processes) doomed.push_back(process.pid);
        }
        std::shuffle(doomed.begin(), doomed.end(), test_rng());
        bool any = false;
        for (const pid_t process : doomed) any = ::kill(process, SIGKILL) == 0 || any;
        return any ? victims : "";
    }

    /// No start found a checkpoint or the history damaged.
    static void check_output(const std::string& output) {
        for (const char* word : {"damaged", "history.jsonl"}) {
            CAPTURE(word);
            REQUIRE_FALSE(contains(output, word));
        }
    }

    /// Checks what the run's folder holds, and that nothing is lost that it held before.
    void look() {
        const std::vector<fs::path> checkpoints = list_checkpoints(run_);
        for (const fs::path& checkpoint : checkpoints) {
            CAPTURE(checkpoint.string());
            REQUIRE(error_of([&] { verify_checkpoint(checkpoint, Verify::everything); }) == "");
        }
        const std::vector<int64_t> now = steps_saved(run_);
        CAPTURE(now, saved_);
        for (const int64_t step : saved_) {
            const auto newer = std::count_if(now.begin(), now.end(),
                                             [&](const int64_t other) { return other > step; });
            const bool is_there = std::find(now.begin(), now.end(), step) != now.end();
            REQUIRE((is_there || (plan_.keep > 0 && newer >= plan_.keep)));
        }
        if (!now.empty() && (saved_.empty() || now.front() > saved_.front())) saved_by_ = last_;
        saved_ = now;
        if (!fs::exists(run_)) return;
        for (const auto& entry : fs::directory_iterator(run_)) {
            const std::string name = entry.path().filename();
            REQUIRE_FALSE(name.ends_with(".damaged"));
            REQUIRE_FALSE(name.ends_with(".suspect"));
        }
        const HistoryChain history = read_history(run_);
        REQUIRE_FALSE(history.broken);
        REQUIRE_FALSE(broken_start(history));
        // The newest may have died before its line; the next start then records it.
        for (size_t i = 1; i < checkpoints.size(); ++i)
            REQUIRE(checkpoint_trouble(checkpoints[i], history) == "");

        const fs::path begun = unfinished(run_);
        if (!checkpoints.empty()) whole_ = bytes_in(checkpoints.front());
        if (begun.empty()) return;
        ++tally_.in_saves;
        if (whole_ > 0) {
            const uintmax_t quarter = 4 * bytes_in(begun) / whole_;
            ++tally_.quarters.at(std::min(quarter, uintmax_t{3}));
        }
    }

    /// Step by step and file by file.
    void compare() const {
        const fs::path whole = folder_ / "undisturbed";
        const Arguments command = plan_.command(whole, saved_by_, usual_launcher());
        CAPTURE(described(command));
        const ProgramResult result = run_program(command, surroundings);
        INFO(result.output);
        REQUIRE(result.exit_code == 0);
        const fs::path one = list_checkpoints(run_).front(),
                       other = list_checkpoints(whole).front();
        std::set<std::string> names, others;
        for (const auto& entry : fs::directory_iterator(one)) names.insert(entry.path().filename());
        for (const auto& entry : fs::directory_iterator(other))
            others.insert(entry.path().filename());
        CHECK(names == others);
        for (const std::string& name : names) {
            // They have checkpoint.async, and the histories' hashes.
            if (name == "train_gpt.json" || name == "manifest.json") continue;
            CAPTURE(name);
            CHECK(file_difference(one / name, other / name) == "");
        }
        CHECK(losses(run_) == losses(whole));
    }

    using Losses = std::vector<std::tuple<int64_t, int64_t, double, double>>;
    static Losses losses(const fs::path& run) {
        Losses all;
        const std::string text = read(run / "metrics.jsonl");
        for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
            const auto line = nlohmann::json::parse(text.substr(at, end - at));
            if (line.contains("loss"))
                all.emplace_back(line.at("step"), line.at("tokens"), line.at("loss"),
                                 line.at("grad_norm"));
        }
        REQUIRE(all.size() == static_cast<size_t>(Plan::steps));
        return all;
    }

    Tally& tally_;
    const Plan plan_;
    const TemporaryDirectory folder_;
    const fs::path run_ = folder_ / "run";
    RanksOfStart last_, saved_by_;  // of the last start, and of the newest checkpoint
    bool done_ = false;
    std::vector<int64_t> saved_;  // the steps of the checkpoints that were last seen
    uintmax_t whole_ = 0;         // bytes of a checkpoint
};

void rage(int64_t kills) {
    Tally tally;
    while (tally.kills < kills) {
        Storm(tally).rage(kills);
        if (tally.runs % 10 == 0) {
            std::printf("%lld kills in %lld runs\n", static_cast<long long>(tally.kills),
                        static_cast<long long>(tally.runs));
            std::fflush(stdout);
        }
    }
    std::string text = concat("storm: ", tally.kills, " kills in ", tally.runs, " runs; ",
                              tally.unkilled, " starts ended without one; ", tally.in_saves,
                              " left an unfinished checkpoint, by quarters of its bytes");
    for (const int64_t n : tally.quarters) text += concat(" ", n);
    for (const auto* counts : {&tally.victims, &tally.meshes}) {
        text += "\nstorm: ";
        for (const auto& [name, n] : *counts) text += concat(name, ": ", n, "; ");
    }
    std::printf("%s\n", text.c_str());
    std::fflush(stdout);
}

}  // namespace

TEST_CASE("a job that is killed a few times ends with the bytes of an undisturbed one", "[storm]") {
    rage(6);
}

// STORM_KILLS: another number of them
TEST_CASE("a storm of kills loses nothing that was saved, and changes no byte in the end",
          "[storm][.][long]") {
    const char* kills = std::getenv("STORM_KILLS");
    rage(kills ? std::atoi(kills) : 200);
}
