// train_gpt train: which training samples a run reads when batch, seed, data or sequence length
// change on resume, and what it says of how often it reads them.
//
// The weights of these runs do not change (the learning rate is too small for fp32), so that the
// loss of a sample tells which one it is: two runs that read the same samples, in any order and any
// steps, have the same sum of losses.
#include <cmath>
#include <map>

#include "test/commands/program.h"

using namespace train_gpt;

namespace {

constexpr int T = 32;  // tokens of a sample

/// What a run has read, by source ("": the only one): the number of samples, and their losses' sum.
struct Read {
    double samples = 0, losses = 0;
};
using Reads = std::map<std::string, Read>;

class Runs {
  public:
    explicit Runs(const Arguments& options = {}) : options_(options) {}

    fs::path folder(const std::string& name) const { return directory_ / name; }
    Arguments command(const std::string& name, const Arguments& more) const {
        return Workplace::get().train(
            folder(name),
            Arguments{"--set", "optimizer.learning_rate=1e-30", "--set", "schedule.warmup_steps=0",
                      "--set", "batch.micro_batch=1", "--set", "evaluation.every=0", "--set",
                      "data.val=", "--set", "sampling.every=0", "--set", "sampling.samples=0",
                      "--set", "log.tensorboard=off"} +
                options_ + more);
    }
    /// Trains with steps of so many samples; returns what was printed.
    std::string train(const std::string& name, int64_t samples, const Arguments& more = {}) const {
        return check_succeeds(
                   train_gpt_with(command(
                       name,
                       Arguments{"--set", concat("batch.tokens_per_step=", samples * T)} + more)))
            .out;
    }
    /// What metrics.jsonl has after a step; a run of one source has "tokens" alone.
    Reads read(const std::string& name, int64_t after_step = 0) const {
        Reads reads;
        std::map<std::string, double> before;
        for (const SortedJson& line : metrics_of(folder(name))) {
            if (!line.contains("loss")) continue;
            for (const auto& [key, value] : line.items()) {
                if (!key.starts_with("tokens") || key == "tokens_per_second") continue;
                const std::string source = key.substr(6);  // "/NAME"
                if (source.empty() == line.contains("tokens/a")) continue;
                const double samples = (value.get<double>() - before[source]) / T;
                before[source] = value.get<double>();
                if (line.at("step") <= after_step || samples == 0) continue;
                reads[source].samples += samples;
                reads[source].losses += samples * line.at("loss" + source).get<double>();
            }
        }
        return reads;
    }
    SortedJson position(const std::string& name, int64_t step) const {
        return SortedJson::parse(
            train_gpt::read(folder(name) / step_folder(step) / "position.json"));
    }

  private:
    TemporaryDirectory directory_;
    Arguments options_;
};

void check_same_samples(const Reads& a, const Reads& b) {
    REQUIRE(a.size() == b.size());
    for (const auto& [source, read] : a) {
        CAPTURE(source);
        CHECK(read.samples == b.at(source).samples);
        CHECK(read.losses == Approx(b.at(source).losses).epsilon(1e-9));
    }
}

Arguments tokens(int64_t samples) {
    return {"--set", "schedule.steps=0", "--set", concat("schedule.tokens=", samples * T)};
}

Arguments mixture() {
    const Workplace& w = Workplace::get();
    const SortedJson sources = {{{"glob", w.data("train_*.bin")}, {"weight", 3}, {"name", "a"}},
                                {{"glob", w.data("val_*.bin")}, {"name", "b"}}};
    return {"--set", "data.train=" + sources.dump()};
}

}  // namespace

TEST_CASE("whatever batches a run resumes with, it reads the samples that one batch would",
          "[cli][data_order]") {
    const bool mixed = random_int(0, 1) == 1;
    Arguments options = mixed ? mixture() : Arguments{};
    if (random_int(0, 1)) options = options + Arguments{"--set", "data.document_mask=true"};
    const Runs runs(options);
    const int64_t all = 2 * random_int(40, 70);
    runs.train("one", 2, tokens(all));
    CAPTURE(mixed, all);

    int64_t step = 0, samples = 0;
    for (int part = 0; part < 3; ++part) {
        const int64_t per_step = random_int(1, 6), steps = random_int(1, 3);
        step += steps;
        samples += steps * per_step;
        runs.train("parts", per_step, tokens(all) + Arguments{"--stop-at", std::to_string(step)});
        const SortedJson position = runs.position("parts", step);
        CHECK(position.at("samples") == samples);
        CHECK(position.at("tokens") == samples * T);
        // A part that is done again, with another batch, from an older checkpoint.
        if (part == 0) {
            const int64_t more = random_int(1, 3);
            runs.train("parts", random_int(1, 6),
                       tokens(all) + Arguments{"--stop-at", std::to_string(step + more)});
            fs::remove_all(runs.folder("parts") / step_folder(step + more));
        }
    }
    const std::string last = runs.train("parts", 1, tokens(all));
    CHECK(contains(last, concat("after ", samples * T, " tokens")));
    CHECK(contains(last, concat("step ", step + all - samples, "/", step + all - samples, " ")));
    check_same_samples(runs.read("parts"), runs.read("one"));
    // The tokens of each line grow by the batch of its step.
    const std::vector<SortedJson> lines = metrics_of(runs.folder("parts"));
    CHECK(lines.back().at("tokens") == all * T);
    CHECK(lines.back().at("step") == step + all - samples);
    const std::string passes = mixed ? "passes/a" : "passes";
    CHECK(lines.back().at(passes) == metrics_of(runs.folder("one")).back().at(passes));
    // The same command finds nothing left to do, and with another batch neither.
    for (const int64_t per_step : {1, 5})
        CHECK(contains(runs.train("parts", per_step, tokens(all)), "already complete: step "));
}

TEST_CASE("a larger batch ends a run in the step that reaches its tokens or epochs",
          "[cli][data_order]") {
    const Runs runs;
    const int64_t first = random_int(2, 9), batch = random_int(2, 9);
    const int64_t all = first + batch * random_int(1, 4) + random_int(1, batch);
    const int64_t steps = first + (all - first + batch - 1) / batch;
    CAPTURE(first, batch, all);
    runs.train("run", 1, tokens(all) + Arguments{"--stop-at", std::to_string(first)});
    const std::string out = runs.train("run", batch, tokens(all));
    CHECK(contains(out, concat(steps - first, " more steps of ", batch * T, " tokens")));
    CHECK(contains(out, concat("step ", steps, "/", steps, " ")));
    CHECK(metrics_of(runs.folder("run")).back().at("tokens") ==
          (first + (steps - first) * batch) * T);
    CHECK(runs.position("run", steps).at("samples") == first + (steps - first) * batch);
}

TEST_CASE("a changed seed or sequence of data begins a new permutation, which is said",
          "[cli][data_order]") {
    const Runs runs;
    const Workplace& w = Workplace::get();
    // All samples of the data once.
    const std::string plan =
        check_succeeds(train_gpt_with(Arguments{"plan"} +
                                      [&] {
                                          Arguments command = runs.command(
                                              "", {"--set", "schedule.steps=0", "--set",
                                                   "schedule.epochs=1", "--set",
                                                   "batch.tokens_per_step=32"});
                                          command.erase(command.begin());
                                          return command;
                                      }()))
            .out;
    const auto epoch = static_cast<int64_t>(number_after(plan, "run          "));
    CAPTURE(plan);
    REQUIRE(epoch > 100);
    CHECK(contains(plan, "1 pass over "));
    runs.train("epoch", epoch, {"--set", "schedule.steps=1"});
    const Reads all = runs.read("epoch");

    const std::string note = "a new permutation of the training data begins here";
    const int64_t before = random_int(1, epoch - 1);
    CHECK_FALSE(contains(runs.train("run", before, {"--set", "schedule.steps=1"}), note));
    const Arguments seed{"--set", "seed=" + std::to_string(random_int(0, 1 << 30))};
    const std::string out = runs.train("run", epoch, seed + Arguments{"--set", "schedule.steps=2"});
    CHECK(contains(out, "note: seed has changed since this checkpoint; " + note));
    check_same_samples(runs.read("run", 1), all);
    CHECK(metrics_of(runs.folder("run")).back().at("passes").get<double>() ==
          Approx(1 + static_cast<double>(before) / static_cast<double>(epoch)));
    CHECK(runs.position("run", 2).at("tokens") == (before + epoch) * T);

    // The order that began there continues where it was, with any batch.
    const int64_t more = random_int(1, epoch / 2);
    CHECK_FALSE(
        contains(runs.train("run", more, seed + Arguments{"--set", "schedule.steps=3"}), note));
    CHECK(runs.position("run", 3).at("samples") == epoch + more);

    // The same text elsewhere is the same data: what the orders took of it counts together.
    const TemporaryDirectory copies;
    fs::copy(fs::path(w.data("train_*.bin")).parent_path(), copies / "data");
    const Arguments renamed{"--set", "data.train=" + (copies / "data/train_*.bin")};
    CHECK_FALSE(contains(
        runs.train("run", 1, seed + renamed + Arguments{"--set", "schedule.steps=4"}), note));
    CHECK(metrics_of(runs.folder("run")).back().at("passes").get<double>() ==
          Approx(1 + static_cast<double>(before + more + 1) / static_cast<double>(epoch)));

    const Arguments moved{"--set", "data.train=" + w.data("val_*.bin")};
    const std::string other =
        runs.train("run", 4, seed + moved + Arguments{"--set", "schedule.steps=5"});
    CHECK(contains(other, "note: data.train has changed since this checkpoint; " + note));
    CHECK_FALSE(contains(other, "its order continues"));
    const Arguments shorter{"--set", "batch.sequence_length=16"};
    CHECK(contains(
        runs.train("run", 4, seed + moved + shorter + Arguments{"--set", "schedule.steps=6"}),
        "note: the sequence length has changed since this checkpoint; " + note));
    const auto version_needed = [&](int step) {
        return SortedJson::parse(read(runs.folder("run") / step_folder(step) / "manifest.json"))
            .at("format_version");
    };
    CHECK(version_needed(1) == 1);
    CHECK(version_needed(2) == 3);  // versions without position.json would guess its position
    const SortedJson position = runs.position("run", 6);
    CHECK(position.at("samples") == 8);
    CHECK(position.at("tokens") == (before + epoch + more + 1 + 8) * T);
}

TEST_CASE("checkpoints of older versions continue after their steps of their own batch",
          "[cli][data_order]") {
    const TemporaryDirectory directory;
    const fs::path folder = directory / "golden";
    fs::copy("test/fixtures/golden-run", folder, fs::copy_options::recursive);
    const ProgramResult result = run_program(
        {"bash", "-c",
         "cd \"$FOLDER\" && exec \"$PROGRAM\" train config.json --set batch.tokens_per_step=320 "
         "--stop-at 6"},
        {{"FOLDER", folder}, {"PROGRAM", fs::absolute(binary())}});
    INFO(result.output);
    REQUIRE(result.exit_code == 0);
    CHECK(contains(result.output, "step-00000004, after 512 tokens"));
    CHECK_FALSE(contains(result.output, "permutation"));
    CHECK(metrics_of(folder / "run").back().at("tokens") == 512 + 2 * 320);
    CHECK(
        SortedJson::parse(read(folder / "run" / step_folder(6) / "position.json")).at("samples") ==
        (512 + 2 * 320) / 16);
}

TEST_CASE("how often a run reads its data is said before and while it does", "[cli][data_order]") {
    const Runs runs;
    const Workplace& w = Workplace::get();
    const std::string note = "up to 4 passes are nearly as good as new text";
    for (const double epochs : {2.0, 4.0, 5.0}) {
        const std::string name = std::to_string(epochs);
        const Arguments options{"--set", "schedule.steps=0",
                                "--set", "schedule.epochs=" + name,
                                "--set", "data.train=" + w.data("val_*.bin"),
                                "--set", "log.every=1000"};
        const std::string passes = concat(epochs, " passes over " + w.data("val_*.bin"));
        const std::string out = runs.train(name, 7, options);
        CHECK(contains(out, "training data, as far as the schedule goes: " + passes));
        CHECK(contains(out, note) == (epochs > 4));
        Arguments planned = runs.command(name, options);
        planned[0] = "plan";
        const std::string plan = check_succeeds(train_gpt_with(planned)).out;
        CHECK(contains(plan, "data         " + passes));
        CHECK(contains(plan, note) == (epochs > 4));
        const double read = metrics_of(runs.folder(name)).back().at("passes").get<double>();
        CHECK(read >= epochs);
        CHECK(read < epochs + 0.5);  // the last step is whole
        const std::string page = train_gpt::read(runs.folder(name) / "report.html");
        CHECK(contains(page, "Passes over the training data"));
        CHECK(contains(page, concat(" of ", epochs, "</td>")));
        CHECK(contains(page, note) == (epochs > 4));
    }
    const Outcome mixed = check_succeeds(
        train_gpt_with(runs.command("mixed", mixture() + Arguments{"--set", "schedule.steps=60"})));
    CHECK(contains(mixed.out, " passes over a"));
    CHECK(contains(mixed.out, " passes over b"));
    const SortedJson last = metrics_of(runs.folder("mixed")).back();
    for (const std::string source : {"a", "b"}) CHECK(last.at("passes/" + source) > 0);
    // Plans work before the data are there.
    Arguments nowhere = runs.command("", {"--set", "data.train=nowhere/*.bin"});
    nowhere[0] = "plan";
    CHECK(contains(check_succeeds(train_gpt_with(nowhere)).out, "passes over it are not known"));
}

TEST_CASE(
    "a batch warm-up reads the samples of equal steps, and stops and resumes with the same bits",
    "[cli]") {
    const Runs runs;
    // Steps of 1, 1, 1, 2, 2, 3, 4, … samples: 1 + floor(3 · samples before / 8)
    const Arguments warm{"--set", "batch.warmup_tokens=256", "--set",
                         "batch.warmup_tokens_per_step=32"};
    const std::vector<int64_t> tokens{32, 64, 96, 160, 224, 320, 448, 576, 704};
    const std::string said = runs.train("warm", 4, warm + Arguments{"--set", "schedule.steps=9"});
    CHECK(contains(said, "32 to 128 tokens"));
    size_t line = 0;
    for (const SortedJson& step : metrics_of(runs.folder("warm")))
        if (step.contains("loss")) CHECK(step.at("tokens") == tokens.at(line++));
    CHECK(line == tokens.size());
    runs.train("equal", 1, {"--set", "schedule.steps=22"});
    const Read warm_read = runs.read("warm").at(""), equal_read = runs.read("equal").at("");
    CHECK(warm_read.samples == 22);
    CHECK(warm_read.losses == Approx(equal_read.losses).epsilon(1e-6));

    // The gradient is the mean over the step's own tokens
    const auto first_norm = [&](const std::string& name) {
        return metrics_of(runs.folder(name)).front().at("grad_norm").get<double>();
    };
    CHECK(first_norm("warm") == Approx(first_norm("equal")).epsilon(1e-5));

    // With a rate that changes weights; a length in tokens
    const Arguments learns = warm + Arguments{"--set", "optimizer.learning_rate=1e-2",
                                              "--set", "schedule.tokens=700",
                                              "--set", "schedule.steps=0"};
    runs.train("whole", 4, learns);
    CHECK(checkpoints_in(runs.folder("whole")).back() == 9);
    const std::string at = std::to_string(random_int(1, 8));
    runs.train("parts", 4, learns + Arguments{"--stop-at", at});
    runs.train("parts", 4, learns);
    check_same_state(runs.folder("whole"), runs.folder("parts"), 9);
    const Outcome plan = check_succeeds(train_gpt_with(Arguments{"plan"} + [&] {
        Arguments command =
            runs.command("plan", learns + Arguments{"--set", "batch.tokens_per_step=128"});
        command.erase(command.begin());
        return command;
    }()));
    CHECK(contains(plan.out, "9 steps, 704 tokens"));
    CHECK(contains(plan.out, "32 tokens in the first step, 128 from step 7 on"));
}

TEST_CASE("a batch warm-up whose steps do not divide the batch is refused", "[cli]") {
    const Runs runs;
    const auto refused = [&](const std::string& tokens, const std::string& per_step,
                             const Arguments& parts) {
        check_refused(
            train_gpt_with(runs.command("refused", {"--set", "batch.tokens_per_step=384", "--set",
                                                    "batch.warmup_tokens=" + tokens, "--set",
                                                    "batch.warmup_tokens_per_step=" + per_step})),
            1, parts);
    };
    refused("1000", "160", {"batch.warmup_tokens_per_step = 160", "divide", "is 128"});
    refused("1000", "100", {"whole number of micro-batches", "is 96"});
    refused("1000", "0", {"batch.warmup_tokens_per_step is 0"});
    refused("0", "96", {"batch.warmup_tokens is 0"});
    refused("1000", "768", {"is 384"});
}
