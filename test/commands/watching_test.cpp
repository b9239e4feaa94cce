// train_gpt train: what a run writes for TensorBoard and as a trace, and that neither ends it.
#include <csignal>
#include <sstream>

#include "test/commands/program.h"
#include "test/training/event_reader.h"

using namespace train_gpt;

namespace {

/// The lines of metrics.jsonl that have a field: its values by step.
std::map<int64_t, float> values_of(const fs::path& run, const std::string& field) {
    std::map<int64_t, float> values;
    std::istringstream lines(read(run / "metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
        const SortedJson json = SortedJson::parse(line);
        if (json.contains(field))
            values[json.at("step")] = static_cast<float>(json.at(field).get<double>());
    }
    return values;
}

void check_scalars(const fs::path& run) {
    const event_reader::Board board = event_reader::board_of(run);
    for (const auto& [field, tag] : {std::pair{"loss", "train/loss"},
                                     {"grad_norm", "train/grad_norm"},
                                     {"learning_rate", "train/learning_rate"},
                                     {"ms", "speed/ms_per_step"},
                                     {"tokens_per_second", "speed/tokens_per_second"},
                                     {"peak_fraction", "speed/peak_fraction"},
                                     {"val_loss", "validation/loss"},
                                     {"val_bits_per_byte", "validation/bits_per_byte"}}) {
        CAPTURE(field);
        const auto values = values_of(run, field);
        CHECK_FALSE(values.empty());
        CHECK(board.scalars.at(tag) == values);
    }
    std::map<int64_t, float> sums;
    for (const auto& [tag, values] : board.scalars)
        if (tag.starts_with("time/"))
            for (const auto& [step, share] : values) sums[step] += share;
    CHECK(sums.size() == values_of(run, "loss").size());
    for (const auto& [step, sum] : sums) CHECK(sum == Approx(1).epsilon(1e-4));
}

}  // namespace

TEST_CASE("a run's folder has its metrics, samples and configuration for TensorBoard",
          "[cli][cuda]") {
    const fs::path run = finished_run();
    check_scalars(run);
    const event_reader::Board board = event_reader::board_of(run);
    const std::string config = read(run / "config.json");
    CHECK(event_reader::without_indent(board.texts.at("config").at(0)) == config);
    CHECK(board.texts.at("samples").size() == 3);  // after steps 4 and 8, and at the end
    for (const auto& [step, text] : board.texts.at("samples"))
        CHECK(event_reader::without_indent(text).starts_with("a"));
    const SortedJson json = SortedJson::parse(config);
    CHECK(board.hparams.at("optimizer.learning_rate") == json["optimizer"]["learning_rate"]);
    CHECK(board.hparams.at("data.train") == json["data"]["train"]);
    CHECK(board.scalars.at("memory/GiB_per_rank").size() == 12);
}

TEST_CASE("the loss of each source is in TensorBoard's file", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    const SortedJson sources{
        {{"glob", w.data("train_*.bin")}, {"weight", 0.5}, {"name", "first"}},
        {{"glob", w.data("val_*.bin")}, {"weight", 0.5}, {"name", "second one"}}};
    check_succeeds(
        train_gpt_with(w.train(run, {"--set", "data.train=" + sources.dump(), "--stop-at", "3"})));
    const event_reader::Board board = event_reader::board_of(run);
    for (const std::string name : {"loss/first", "loss/second one", "tokens/first"})
        CHECK(board.scalars.at("sources/" + name) == values_of(run, name));
}

TEST_CASE("TensorBoard's file of a killed and resumed run has each step once", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    const Arguments options = endless + Arguments{"--set", "checkpoint.every=5"};
    for (int start = 0; start < 2; ++start) {
        Process process(w.train(run, options));
        REQUIRE(process.wait_for_step(random_int(11, 16) + 20 * start));
        process.signal(SIGKILL);
        CHECK(process.finish().code == -SIGKILL);
        // What a kill in the middle of a write leaves behind.
        if (random_int(0, 1))
            std::ofstream(event_reader::event_files(run).at(0), std::ios::app)
                << read(event_reader::event_files(run).at(0)).substr(0, 20);
    }
    check_succeeds(train_gpt_with(w.train(run, options + Arguments{"--stop-at", "60"})));
    check_scalars(run);
    CHECK(event_reader::board_of(run).scalars.at("train/loss").size() == 60);
}

TEST_CASE("a run without TensorBoard's file has none, and one that resumes with it has all steps",
          "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    check_succeeds(
        train_gpt_with(w.train(run, {"--set", "log.tensorboard=off", "--stop-at", "3"})));
    CHECK(event_reader::event_files(run).empty());
    check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "5"})));
    check_scalars(run);
}

TEST_CASE("a run continues where TensorBoard's file cannot be written, and says so once", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    SECTION("from the start") {
        fs::create_directories(run / "events.new.tmp");
        const Outcome outcome = check_succeeds(train_gpt_with(w.train(run)));
        CHECK(occurrences(outcome.err, "TensorBoard") == 1);
        CHECK(contains(outcome.err, "warning: there will be no file for TensorBoard: "));
        CHECK(contains(outcome.err, "events.new"));
        CHECK(event_reader::event_files(run).empty());
    }
    SECTION("from a step on") {
        // A limit that only the event file reaches: it begins with the configuration.
        const auto largest = fs::file_size(event_reader::event_files(finished_run()).at(0));
        const Outcome outcome = train_gpt_with(
            w.train(run, {"--set", "schedule.steps=40", "--set", "checkpoint.every=0"}),
            {.file_bytes = static_cast<rlim_t>(largest)});
        CHECK(outcome.code == 1);  // nor does the checkpoint fit
        CHECK(occurrences(outcome.err, "events.out.tfevents") == 1);
        CHECK(
            contains(outcome.err, "training continues, and metrics are lost until there is space"));
        CHECK_FALSE(event_reader::board_of(run).scalars.at("train/loss").empty());
    }
    CHECK(metrics_of(run).size() > 12);
}

TEST_CASE(
    "a trace that ends early has the steps that were done, and one that cannot be written "
    "does not end the run",
    "[cli][cuda]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    const Outcome stopped =
        check_succeeds(train_gpt_with(w.train(run, {"--trace", "9", "--stop-at", "5"})));
    const std::string file = run / "trace/step-00000003.json";
    CHECK(contains(stopped.out, "trace of 3 steps: " + file));
    CHECK_FALSE(contains(stopped.out, "missing"));
    std::set<int64_t> steps;
    const SortedJson trace = SortedJson::parse(read(file));
    for (const SortedJson& event : trace.at("traceEvents"))
        if (event.at("ph") == "X") steps.insert(event.at("args").at("step").get<int64_t>());
    CHECK(steps == std::set<int64_t>{3, 4, 5});

    fs::remove_all(run / "trace");
    write(run / "trace", "a file");
    const Outcome resumed = check_succeeds(train_gpt_with(w.train(run, {"--trace", "2"})));
    CHECK(contains(resumed.err, "warning: there is no trace, since it could not be written: "));
    CHECK(occurrences(resumed.err, "trace") > 0);
    CHECK(metrics_of(run).back().at("step") == 12);

    const Outcome more = check_succeeds(
        train_gpt_with(w.train(run, {"--set", "schedule.steps=14", "--trace", "3"})));
    CHECK(contains(more.out, "no trace, which takes 5 steps; 2 are left"));
    CHECK(contains(
        check_succeeds(train_gpt_with(w.train(run, {"--set", "schedule.steps=14", "--trace", "3"})))
            .out,
        "note: there is no trace, since no steps are left"));
}
