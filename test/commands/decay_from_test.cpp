// schedule.decay_from: a run that begins with the state of another run's checkpoint and decays.
#include <map>

#include "test/commands/program.h"

using namespace train_gpt;

namespace {

Arguments set(const Arguments& values) {
    Arguments all;
    for (const std::string& value : values) {
        all.emplace_back("--set");
        all.push_back(value);
    }
    return all;
}

/// The files of a folder and its folders, with their bytes.
std::map<std::string, std::string> contents_of(const fs::path& folder) {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(folder))
        if (entry.is_regular_file()) files[entry.path()] = read(entry.path());
    return files;
}

/// What metrics.jsonl has of the training steps after a step.
std::vector<SortedJson> steps_after(const fs::path& run, int64_t step) {
    std::vector<SortedJson> lines;
    for (const SortedJson& line : metrics_of(run))
        if (line.contains("loss") && line.at("step") > step) lines.push_back(line);
    return lines;
}

void check_same_weights(const fs::path& a, const fs::path& b, int64_t step) {
    for (const std::string& name : {std::string("model.safetensors"), std::string(optimizer_file)})
        CHECK(file_difference(a / step_folder(step) / name, b / step_folder(step) / name) == "");
}

/// A run with a constant rate, and checkpoints of steps 4, 8, 12, 16 and 20.
const Arguments options = set({"checkpoint.every=4", "sampling.every=0", "sampling.samples=0",
                               "evaluation.every=0", "schedule.steps=20"});

}  // namespace

TEST_CASE("a run that decays from a checkpoint has the bits of a run that decayed there", "[cli]") {
    const Workplace& place = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path stable = directory / "stable", whole = directory / "whole",
                   annealed = directory / "annealed", moved = directory / "moved";
    check_succeeds(train_gpt_with(place.train(stable, options + set({"schedule.decay=constant"}))));
    const int64_t start = 4 * random_int(2, 4), steps = random_int(2, 6), end = start + steps;
    fs::create_directory(stable / step_folder(start) / "notes");  // no file of the checkpoint
    const auto before = contents_of(stable);
    CAPTURE(start, steps);
    const std::string length = concat("schedule.decay_steps=", steps);
    check_succeeds(train_gpt_with(place.train(
        whole, options + set({"schedule.decay=wsd", length, concat("schedule.steps=", end)}))));
    const Arguments decays = place.train(
        annealed,
        options + set({"schedule.decay=wsd", length,
                       concat("schedule.decay_from=", (stable / step_folder(start)).string())}));
    check_succeeds(train_gpt_with(decays + Arguments{"--stop-at", std::to_string(start + 1)}));
    CHECK(contents_of(stable) == before);
    fs::rename(stable, moved);  // the run has all that it needs
    const Outcome outcome = check_succeeds(train_gpt_with(decays));
    check_same_weights(whole, annealed, end);
    CHECK(steps_after(annealed, 0) == steps_after(whole, start));
    CHECK(steps_after(annealed, 0).back().at("learning_rate") == Approx(3e-4));
    CHECK(contains(check_succeeds(train_gpt_with(decays)).out, "already complete"));
}

TEST_CASE("without schedule.decay_steps a decay from a checkpoint is decay_fraction of all steps",
          "[cli]") {
    const Workplace& place = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "annealed";
    const Arguments decays = place.train(
        run, set({"sampling.every=0", "schedule.decay=wsd", "schedule.decay_fraction=0.4",
                  "schedule.decay_from=" + finished_run()}));
    Arguments plan = decays;
    plan[0] = "plan";
    const auto check_plan = [&] {
        const std::string text = check_succeeds(train_gpt_with(plan)).out;
        CHECK(contains(text, "run          8 steps, 2,048 tokens\n"));
        CHECK(contains(text, "after the 12 steps of " + finished_run() + "/" + step_folder(12) +
                                 ", which had 3,072 tokens\n"));
    };
    check_plan();
    check_succeeds(train_gpt_with(decays));
    check_plan();
    // 12 steps are before it, and 8 are 0.4 of 20
    CHECK(checkpoints_in(run) == std::vector<int64_t>{12, 20});
    for (const SortedJson& line : steps_after(run, 0)) {
        const auto step = line.at("step").get<double>();
        CHECK(line.at("learning_rate") == Approx(3e-3 * (1 - 0.9 * (step - 12) / 8)));
    }
    const Outcome other = train_gpt_with(
        place.train(run, set({"schedule.decay=wsd",
                              "schedule.decay_from=" + finished_run() + "/" + step_folder(8)})));
    check_refused(other, 1, {"decays from", step_folder(8), "run_dir"});
}

TEST_CASE("the runs of a sweep decay from the same checkpoint, also if they begin later",
          "[cli][sweep]") {
    const Workplace& place = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path stable = directory / "stable";
    const std::string folder = directory / "sweep";
    const Arguments constant = options + set({"schedule.decay=constant", "checkpoint.keep=0"});
    check_succeeds(train_gpt_with(place.train(stable, constant + set({"schedule.steps=8"}))));
    // The folder, whose newest checkpoint changes, and a checkpoint in it
    const Arguments sweep =
        Arguments{"sweep", place.config(), "--vary",
                  concat("schedule.decay_from=", stable.string(), ",",
                         (stable / step_folder(4)).string())} +
        options + set({"run_dir=" + folder, "schedule.decay=wsd", "schedule.decay_steps=2"});
    const auto check_begun = [&](size_t runs, int64_t newest) {
        const SortedJson json = SortedJson::parse(read(folder + "/sweep.json"));
        CHECK(json.at("runs").size() == runs);
        for (const SortedJson& run : json.at("runs")) {
            const std::string given = run.at("values").at("schedule.decay_from");
            const int64_t start = given == stable ? newest : 4;
            CHECK(run.at("state") == "finished");
            CHECK(checkpoints_in(fs::path(folder) / run.at("name").get<std::string>()) ==
                  std::vector<int64_t>{start, start + 2});
        }
    };
    check_succeeds(train_gpt_with(sweep));
    check_begun(2, 8);
    check_succeeds(train_gpt_with(place.train(stable, constant + set({"schedule.steps=12"}))));
    check_succeeds(train_gpt_with(sweep));
    check_succeeds(train_gpt_with(sweep + Arguments{"--seeds", "2"}));
    check_begun(4, 8);
}

TEST_CASE("schedule.decay_from refuses what it cannot decay from, and leaves no folder", "[cli]") {
    const Workplace& place = Workplace::get();
    const TemporaryDirectory directory;
    const auto refused = [&](const Arguments& more, const Arguments& parts,
                             const std::string& run = "") {
        check_refused(train_gpt_with(place.train(run.empty() ? directory / "run" : run, set(more))),
                      1, parts);
        CHECK_FALSE(fs::exists(directory / "run"));
    };
    const std::string from = "schedule.decay_from=" + finished_run();
    refused({from}, {"schedule.decay", "wsd"});
    refused({from, "schedule.decay=wsd", "schedule.decay_fraction=1"}, {"schedule.decay_steps"});
    refused({"schedule.decay_from=" + (directory / "nowhere"), "schedule.decay=wsd"}, {"nowhere"});
    refused({from, "schedule.decay=wsd"}, {"has one already", "run_dir"}, finished_run());
    refused({"schedule.decay=wsd", "schedule.decay_steps=13"}, {"schedule.decay_steps = 13", "12"});
    refused({from, "schedule.decay=wsd", "model.n_layer=3"}, {"n_layer"});
    refused({from, "schedule.decay=wsd", "optimizer.name=muon"}, {"optimizer adamw"});
    refused({from, "schedule.decay=wsd", "parallel.pipeline=2"}, {"pipeline"});
    // A model alone, under a checkpoint's name and under its own
    for (const std::string& model : {directory / "model", directory / "step-00000008"}) {
        check_succeeds(train_gpt_with({"export", finished_run(), "--out", model}));
        refused({"schedule.decay_from=" + model, "schedule.decay=wsd"},
                {model, "without the state of a run", "manifest.json", "model.init_from"});
    }
}
