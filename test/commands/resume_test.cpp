// train_gpt train: what a resumed run takes from its checkpoint, and what does not end a run.
#include <chrono>
#include <csignal>
#include <thread>

#include "test/commands/program.h"

using namespace train_gpt;

TEST_CASE("a resumed run uses the choices of its checkpoint, not what it would choose now",
          "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path run = directory / "run", whole = directory / "whole";
    check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "4"})));
    const fs::path checkpoint = run / step_folder(4);
    SortedJson choices = SortedJson::parse(read(checkpoint / "choices.json"));
    REQUIRE(choices.at("recompute") == "none");  // this model fits without recomputation
    choices["recompute"] = "block";
    replace_in_checkpoint(checkpoint, "choices.json", choices.dump(2));

    const Outcome resumed = check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "8"})));
    CHECK(contains(resumed.out, "resuming from " + checkpoint.string()));
    CHECK_FALSE(fs::exists(checkpoint.string() + ".damaged"));
    for (const fs::path& folder : {run, run / step_folder(8)})
        CHECK(SortedJson::parse(read(folder / "choices.json")).at("recompute") == "block");
    // Recomputation takes less memory and gives the same bits.
    const Outcome all = check_succeeds(train_gpt_with(w.train(whole, {"--stop-at", "8"})));
    const std::string tokens = " tokens (2 micro-batches of 4 × 32), ";
    CHECK(number_after(resumed.out, tokens) < number_after(all.out, tokens));
    check_same_state(whole, run, 8);
}

TEST_CASE("a resumed run keeps its kernels; on another GPU it chooses anew and says so",
          "[cli][cuda]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const Arguments options{"--set", "kernels.autotune=on", "--set", "precision.dtype=bf16",
                            "--set", "checkpoint.every=4"};
    const fs::path whole = directory / "whole";
    check_succeeds(train_gpt_with(w.train(whole, options)));
    const SortedJson chosen = SortedJson::parse(read(whole / "choices.json"));
    const bool on_gpu = !chosen.at("kernels").empty();
    CHECK(chosen.at("platform").get<std::string>().empty() != on_gpu);

    // The run after its checkpoint of step 4, whose choices are changed.
    const auto resume = [&](const std::string& name,
                            const std::function<void(SortedJson&)>& change) {
        const fs::path run = directory / name;
        fs::copy(whole, run, fs::copy_options::recursive);
        for (const int64_t step : {8, 12}) fs::remove_all(run / step_folder(step));
        SortedJson choices = SortedJson::parse(read(run / step_folder(4) / "choices.json"));
        CHECK(choices == chosen);
        change(choices);
        replace_in_checkpoint(run / step_folder(4), "choices.json", choices.dump(2));
        const std::string out = check_succeeds(train_gpt_with(w.train(run, options))).out;
        CHECK(contains(out, "resuming from " + (run / step_folder(4)).string()));
        const SortedJson now = SortedJson::parse(read(run / "choices.json"));
        CHECK(now.at("platform") == chosen.at("platform"));
        CHECK(now.at("kernels").size() == chosen.at("kernels").size());
        return out;
    };
    const std::string note = "note: the run's kernels had been chosen on ";
    CHECK_FALSE(contains(resume("parts", [](SortedJson&) {}), note));
    CHECK(SortedJson::parse(read(directory / "parts/choices.json")) == chosen);
    check_same_state(whole, directory / "parts", 12);

    const std::string moved =
        resume("moved", [](SortedJson& choices) { choices["platform"] = "another GPU"; });
    CHECK(contains(moved, note + "another GPU; they are chosen anew on ") == on_gpu);
    // What versions wrote that did not record the GPU is not read.
    const std::string older = resume("older", [](SortedJson& choices) {
        choices.erase("platform");
        for (SortedJson& line : choices["kernels"]) line = "nt bf16 1 2 3";
    });
    CHECK(contains(older, note + "a GPU that is not recorded; ") == on_gpu);
}

TEST_CASE("schedule.max_minutes counts minutes", "[cli]") {
    const TemporaryDirectory directory;
    Process process(Workplace::get().train(
        directory / "run", endless + Arguments{"--set", "schedule.max_minutes=0.5"}));
    REQUIRE(process.wait_for_step(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    const size_t printed = process.out().size();
    REQUIRE(process.wait_until([&] { return process.out().size() > printed + 400; }));
    process.signal(SIGTERM);
    CHECK_FALSE(contains(process.finish().out, "schedule.max_minutes"));
}

TEST_CASE("a run that an earlier version began resumes", "[cli]") {
    // Made by commit d988c49: 12 steps, of which the fixture has the checkpoint of step 4.
    const TemporaryDirectory directory;
    const fs::path folder = directory / "golden";
    fs::copy("test/fixtures/golden-run", folder, fs::copy_options::recursive);
    const std::vector<SortedJson> before = metrics_of(folder / "run");
    const ProgramResult result = run_program(
        {"bash", "-c", "cd \"$FOLDER\" && exec \"$PROGRAM\" train config.json"},
        {{"FOLDER", folder}, {"PROGRAM", fs::absolute(binary())}, {"OMP_NUM_THREADS", "1"}});
    INFO(result.output);
    REQUIRE(result.exit_code == 0);
    CHECK(contains(result.output, "resuming from run/" + step_folder(4)));
    CHECK_FALSE(contains(result.output, "parallel.sums"));
    CHECK(checkpoints_in(folder / "run") == std::vector<int64_t>{4, 8, 12});
    // The same bits on the same processor; on others, sums are rounded differently.
    const std::vector<SortedJson> after = metrics_of(folder / "run");
    REQUIRE(after.size() == before.size());
    for (size_t i = 0; i < before.size(); ++i)
        for (const auto& [key, value] : before[i].items()) {
            INFO("line " << i << ", " << key);
            CHECK(after[i].at(key).get<double>() == Approx(value.get<double>()).epsilon(1e-3));
        }
    // It still adds gradients as it did, in fp32.
    CHECK(SortedJson::parse(read(folder / "run" / step_folder(12) / "choices.json")).at("sums") ==
          "fp32");
    CHECK_FALSE(fs::exists(folder / "run" / step_folder(12) / "grids.safetensors"));
}

TEST_CASE("a run that resumes with other threads says so where they change bits", "[cli]") {
    const bool own = random_int(0, 1) == 1;
    const TemporaryDirectory directory;
    const auto start = [&](int threads, const char* stop) {
        const Arguments command = Workplace::get().train(
            directory / "run",
            {"--stop-at", stop, "--set", own ? "kernels.gemm=own" : "kernels.gemm=auto", "--set",
             "device=cpu"});
        std::vector<std::string> all{binary()};
        all.insert(all.end(), command.begin(), command.end());
        return run_program(all, {{"OMP_NUM_THREADS", std::to_string(threads)}});
    };
    CHECK(start(1, "2").exit_code == 0);
    const SortedJson choices = SortedJson::parse(read(directory / "run/choices.json"));
    const bool depends = choices.contains("threads");
#ifdef TRAIN_GPT_ONEDNN
    CHECK(depends == !own);
#else
    CHECK_FALSE(depends);
#endif
    for (const auto& [threads, stop] : {std::pair{1, "3"}, {2, "4"}}) {
        const ProgramResult result = start(threads, stop);
        INFO(result.output);
        CHECK(result.exit_code == 0);
        CHECK(contains(result.output, "a rank had 1 thread and has 2 now") ==
              (depends && threads == 2));
    }
}

TEST_CASE("a run does not resume with another optimizer, and with its own it resumes bit by bit",
          "[cli][cuda]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path run = directory / "run", whole = directory / "whole";
    const auto with = [](const std::string& optimizer, int64_t stop) {
        return Arguments{"--set", "optimizer.name=" + optimizer, "--stop-at", std::to_string(stop)};
    };
    check_succeeds(train_gpt_with(w.train(run, with("muon", 4))));
    const Outcome other = train_gpt_with(w.train(run, with("adamw", 8)));
    CHECK(other.code == 1);
    CHECK(contains(other.err, "has the state of the optimizer muon, and optimizer.name is adamw"));
    check_succeeds(train_gpt_with(w.train(run, with("muon", 8))));
    check_succeeds(train_gpt_with(w.train(whole, with("muon", 8))));
    check_same_state(whole, run, 8);
}
