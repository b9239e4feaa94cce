// `train_gpt sweep` as a process: what it trains, what it skips, how it stops, and what it says.
#include <cctype>
#include <cmath>
#include <csignal>
#include <string>
#include <vector>

#include "test/commands/program.h"

using namespace train_gpt;

namespace {

Arguments sweep(const std::string& folder, const Arguments& more) {
    return Arguments{"sweep", Workplace::get().config(), "--set", "run_dir=" + folder} + more;
}

/// Validation loss of the last evaluation in a run's metrics.
double final_loss(const fs::path& run) {
    double loss = std::nan("");
    for (const SortedJson& line : metrics_of(run))
        if (line.contains("val_loss")) loss = line.at("val_loss");
    return loss;
}

SortedJson result(const std::string& folder) {
    return SortedJson::parse(read(folder + "/sweep.json"));
}

/// The runs of the sweep in a folder that are alive.
std::vector<pid_t> runs_alive(const std::string& folder) {
    std::vector<pid_t> pids;
    for (const std::string& name : names_in("/proc")) {
        std::error_code code;
        const fs::path line = fs::path("/proc") / name / "cmdline";
        if (!std::isdigit(static_cast<unsigned char>(name[0])) || !fs::exists(line, code)) continue;
        const std::string words = read(line);
        if (contains(words, folder) && contains(words, "given.json"))
            pids.push_back(std::stoi(name));
    }
    return pids;
}

}  // namespace

TEST_CASE("a sweep trains every combination with every seed, names the best, and continues",
          "[cli][sweep]") {
    const TemporaryDirectory directory;
    const std::string folder = directory / "sweep";
    const Arguments values{"--seeds", "2", "--jobs", "2", "--vary"};
    const Outcome outcome = check_succeeds(
        train_gpt_with(sweep(folder, values + Arguments{"optimizer.learning_rate=1e-4,3e-3"})));
    const SortedJson json = result(folder);
    REQUIRE(json.at("runs").size() == 4);
    for (const double rate : {1e-4, 3e-3}) {
        double sum = 0;
        for (const SortedJson& run : json.at("runs")) {
            if (run.at("values").at("optimizer.learning_rate") != rate) continue;
            const fs::path of = fs::path(folder) / run.at("name").get<std::string>();
            const SortedJson config = SortedJson::parse(read(of / "config.json"));
            CHECK(config.at("optimizer").at("learning_rate") == rate);
            CHECK(config.at("seed") == run.at("seed"));
            CHECK(run.at("loss") == Approx(final_loss(of)));
            sum += final_loss(of);
        }
        for (const SortedJson& row : json.at("combinations"))
            if (row.at("values").at("optimizer.learning_rate") == rate)
                CHECK(row.at("mean") == Approx(sum / 2));
    }
    CHECK(json.at("best").at("values").at("optimizer.learning_rate") == 3e-3);
    CHECK(json.at("keys").at(0).at("at_edge") == "high");
    CHECK(contains(outcome.out, "best: optimizer.learning_rate = 0.003"));
    CHECK(contains(outcome.out, "it is the largest value tried"));
    CHECK(contains(read(folder + "/report.html"), "optimizer.learning_rate = 0.003"));

    // Its runs are those of `train`
    const std::string alone = directory / "alone",
                      name = "/optimizer.learning_rate=0.003,seed=1338";
    check_succeeds(train_gpt_with(Workplace::get().train(alone, {"--set", "seed=1338"})));
    check_same_state(alone, folder + name, 12);

    // With one more value, what is finished is not trained again
    const std::string before = read(folder + name + "/history.jsonl");
    const Outcome longer = check_succeeds(train_gpt_with(
        sweep(folder, values + Arguments{"optimizer.learning_rate=1e-4,3e-3,1", "--json"})));
    CHECK(read(folder + name + "/history.jsonl") == before);
    const SortedJson printed = SortedJson::parse(longer.out);
    CHECK(printed == result(folder));
    CHECK(printed.at("runs").size() == 6);
    CHECK(printed.at("best").at("mean") == json.at("best").at("mean"));
    CHECK(printed.at("keys").at(0).at("at_edge").is_null());

    // Another configuration does not belong to it
    check_refused(train_gpt_with(sweep(folder, {"--set", "schedule.steps=13", "--vary",
                                                "optimizer.learning_rate=3e-3"})),
                  1, {"schedule.steps changed from 12 to 13", "run_dir"});
    check_refused(train_gpt_with(sweep(folder + name, {})), 1, {"is the folder of a run"});
}

TEST_CASE("a sweep that a signal stops saves its runs, and the same command finishes them",
          "[cli][sweep]") {
    const TemporaryDirectory directory;
    constexpr int64_t steps = 3200;  // so many that no job ends before the other has begun
    const std::string folder = directory / "sweep";
    const Arguments command = sweep(
        folder, {"--set", concat("schedule.steps=", steps), "--set", "sampling.every=0", "--set",
                 "evaluation.every=0", "--vary", "optimizer.weight_decay=0,0.5,1", "--jobs", "2"});
    const int signal = random_int(0, 1) ? SIGINT : SIGTERM;
    const std::string first = folder + "/optimizer.weight_decay=0.0,seed=1337",
                      second = folder + "/optimizer.weight_decay=0.5,seed=1337",
                      third = folder + "/optimizer.weight_decay=1.0,seed=1337";
    {
        Process process(command, {.environment = {"OMP_NUM_THREADS=2"}});
        REQUIRE(process.wait_until([&] {
            return fs::exists(first + "/output.txt") && fs::exists(second + "/output.txt") &&
                   contains(read(first + "/output.txt"), "step 5/") &&
                   contains(read(second + "/output.txt"), "step 5/");
        }));
        for (const pid_t pid : runs_alive(folder))  // both jobs share the threads
            CHECK(contains(read(concat("/proc/", pid, "/environ")), "OMP_NUM_THREADS=1"));
        process.signal(signal);
        const Outcome outcome = check_stopped(process.finish(), signal == SIGINT ? 130 : 75);
        CHECK(contains(outcome.out, "the same command continues"));
    }
    CHECK(runs_alive(folder).empty());
    for (const std::string& run : {first, second}) {
        REQUIRE(checkpoints_in(run).size() == 1);
        CHECK(checkpoints_in(run).front() < steps);
    }
    CHECK_FALSE(fs::exists(third + "/metrics.jsonl"));
    check_succeeds(train_gpt_with(command));
    const std::string alone = directory / "alone";
    check_succeeds(train_gpt_with(Workplace::get().train(
        alone, {"--set", concat("schedule.steps=", steps), "--set", "sampling.every=0", "--set",
                "evaluation.every=0", "--set", "optimizer.weight_decay=0.5"})));
    check_same_state(alone, second, steps);
}

TEST_CASE("the runs of a sweep that is killed save and end", "[cli][sweep]") {
    const TemporaryDirectory directory;
    const std::string folder = directory / "sweep", run = folder + "/seed=1337";
    {
        Process process(sweep(folder, endless));
        REQUIRE(process.wait_until([&] {
            return fs::exists(run + "/output.txt") &&
                   contains(read(run + "/output.txt"), "step 5/");
        }));
        process.signal(SIGKILL);
        process.finish();
    }
    for (int i = 0; i < 2000 && !runs_alive(folder).empty(); ++i) ::usleep(10000);
    CHECK(runs_alive(folder).empty());
    for (const pid_t pid : runs_alive(folder)) ::kill(pid, SIGKILL);
    CHECK(checkpoints_in(run).size() == 1);
}

TEST_CASE("a run of a sweep that fails does not end the others", "[cli][sweep]") {
    const TemporaryDirectory directory;
    const std::string folder = directory / "sweep";
    // As if started by a program that ignores its children's ends
    const Outcome outcome =
        train_gpt_with(Arguments{"-c", "trap '' CHLD; exec \"$0\" \"$@\"", binary()} +
                           sweep(folder, {"--vary", "optimizer.learning_rate=1e30,1e-3"}),
                       {.program = "/bin/bash"});
    CHECK(outcome.code == 1);
    CHECK(contains(outcome.err, "1 of 2 runs failed"));
    CHECK(contains(outcome.err, "the gradient of step"));
    CHECK(contains(outcome.err, "the loss after each checkpoint was not finite"));
    CHECK_FALSE(contains(outcome.err, "nan"));
    const SortedJson json = result(folder);
    for (const SortedJson& run : json.at("runs"))
        CHECK(run.at("state") ==
              (run.at("values").at("optimizer.learning_rate") == 1e-3 ? "finished" : "failed"));
    CHECK(json.at("best").at("values").at("optimizer.learning_rate") == 1e-3);
    CHECK(contains(read(folder + "/report.html"), "failed"));
}

TEST_CASE("halving stops the worse half of the combinations at a quarter and at half of the steps",
          "[cli][sweep]") {
    const TemporaryDirectory directory;
    const std::string folder = directory / "sweep";
    // Which combination is worse does not depend on the seed
    check_succeeds(train_gpt_with(
        sweep(folder, {"--set", "schedule.steps=24", "--set", "evaluation.every=0", "--vary",
                       "optimizer.learning_rate=1e-7,1e-6,3e-3,1e-5", "--halve", "--jobs", "2"})));
    const SortedJson json = result(folder);
    for (const SortedJson& run : json.at("runs")) {
        const double rate = run.at("values").at("optimizer.learning_rate");
        CAPTURE(rate);
        if (rate == 3e-3) {
            CHECK(run.at("state") == "finished");
        } else {
            CHECK(run.at("state") == "halved");
            CHECK(run.at("step") == (rate == 1e-5 ? 12 : 6));
        }
    }
    // Without --halve, the same command trains the rest
    check_succeeds(train_gpt_with(
        sweep(folder, {"--set", "schedule.steps=24", "--set", "evaluation.every=0", "--vary",
                       "optimizer.learning_rate=1e-7,1e-6,3e-3,1e-5", "--jobs", "2"})));
    const SortedJson rest = result(folder);
    for (const SortedJson& run : rest.at("runs")) CHECK(run.at("state") == "finished");
}

TEST_CASE("runs with different validation data are compared by their training loss",
          "[cli][sweep]") {
    const TemporaryDirectory directory;
    const std::string folder = directory / "sweep", some = Workplace::get().data("val_*.bin"),
                      other = Workplace::get().data("train_*.bin");
    const Outcome outcome = check_succeeds(train_gpt_with(
        sweep(folder, {"--vary", concat("data.val=", some, ",", other, ","), "--jobs", "2"})));
    CHECK(contains(outcome.out, "compared by their training loss, since data.val is varied"));
    const SortedJson json = result(folder);
    CHECK(json.at("measure") == "loss");
    for (const SortedJson& run : json.at("runs")) CHECK(run.at("loss").is_number());
}

TEST_CASE("sweep refuses keys and values that no run could have, before any run begins",
          "[cli][sweep]") {
    const TemporaryDirectory directory;
    const std::string folder = directory / "sweep";
    const auto refused = [&](const Arguments& more, int code, const Arguments& parts) {
        check_refused(train_gpt_with(sweep(folder, more)), code, parts);
        CHECK_FALSE(fs::exists(folder));
    };
    refused(
        {"--vary", "optimizer.learning_rat=1"}, 1,
        {"--vary optimizer.learning_rat=1", "nearest valid key is \"optimizer.learning_rate\""});
    refused({"--vary", "model.n_head=2,3"}, 1, {"model.n_head = 3"});
    refused({"--vary", "optimizer.beta1"}, 2, {"write --vary section.key=value"});
    refused({"--vary", "data.train=" + Workplace::get().data("train_*.bin") + ",nowhere_*.bin"}, 1,
            {"nowhere_*.bin"});
    refused({"--seeds", "0"}, 2, {"--seeds"});
    refused({"--optimizer.beta1=0.9"}, 2, {"--set optimizer.beta1=0.9"});
}
