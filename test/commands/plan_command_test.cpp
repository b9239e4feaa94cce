// train_gpt plan compared with the run that it describes.

#include <algorithm>
#include <cmath>
#include <regex>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "device/architecture.h"
#include "model/families/family.h"
#include "test/commands/program.h"
#include "training/config/layout.h"
#include "training/config/load_config.h"

using namespace train_gpt;

TEST_CASE("the plan is what the run takes", "[cli][cuda]") {
    const TemporaryDirectory directory;
    for (const char* level : {"none", "elementwise", "block"}) {
        const Arguments overrides{"--set", std::string("memory.recompute=") + level,
                                  "--set", "schedule.steps=1",
                                  "--set", "schedule.warmup_steps=0"};
        const std::string plan =
            check_succeeds(train_gpt_with(Arguments{"plan", Workplace::get().config()} + overrides))
                .out;
        const std::string run =
            check_succeeds(train_gpt_with(Workplace::get().train(directory / level, overrides)))
                .out;
        const std::string label = std::string("memory.recompute = ") + level + ": ";
        const size_t at = plan.find(label);
        CAPTURE(plan, run);
        REQUIRE(at != std::string::npos);
        const std::string total =
            plan.substr(at + label.size(), plan.find(" of ", at) - at - label.size());
        CHECK(contains(total, "MiB"));
        CHECK(contains(run, ", " + total + ", into "));
        // The table has the same in the column of this level.
        const size_t header = plan.find("by recompute level"), end = plan.find("\n  total ");
        REQUIRE(header < end);
        std::istringstream levels(plan.substr(plan.find('\n', header), end)),
            totals(plan.substr(end));
        std::string column, number, unit;
        totals >> unit;  // the row's name
        while (column != level && levels >> column) totals >> number >> unit;
        CHECK(number + " " + unit == total);
    }
    const std::string two =
        check_succeeds(train_gpt_with({"plan", Workplace::get().config(), "--world", "2"})).out;
    CHECK(contains(two, "2 ranks"));
    CHECK(contains(two, "on 2 ranks: 1 each\n"));
    CHECK(contains(check_succeeds(train_gpt_with({"plan", Workplace::get().config(), "--world", "2",
                                                  "--local-ranks", "1"}))
                       .out,
                   " available here\n"));
    check_refused(train_gpt_with({"plan", "gpt2-124m", "--gpu", "h100", "--local-ranks", "1"}), 2,
                  {"--local-ranks", "--gpu"});
    CHECK(contains(two, "ZeRO-1: "));
    check_refused(train_gpt_with({"plan", Workplace::get().config(), "--world", "3"}), 1,
                  {"3", "batch.tokens_per_step"});
}

TEST_CASE("a plan that does not fit is printed, and ends with exit code 1 and one sentence",
          "[cli]") {
    const Outcome outcome = train_gpt_with({"plan", "configs/gpt3-175b.json", "--set", "device=cpu",
                                            "--set", "model.n_layer=4096", "--world", "8"});
    check_refused(outcome, 1, {"the run needs ", "take a smaller model"});
    CHECK(contains(outcome.out, "DOES NOT FIT"));
    CHECK(contains(outcome.out, "parameters   "));
}

TEST_CASE("the plan of a preset whose weights no GPU can hold says what splits them", "[cli]") {
    const auto plan = [](const char* preset) {
        return train_gpt_with({"plan", concat("configs/", preset, ".json"), "--set", "device=cpu",
                               "--set", "precision.dtype=bf16", "--set", "parallel.tensor=1",
                               "--set", "parallel.zero=1"})
            .out;
    };
    CHECK(contains(plan("gpt3-175b"), "parallel.zero=3 splits them over ranks"));
    CHECK_FALSE(contains(plan("gpt3-13b"), "which no GPU has"));
}

TEST_CASE("a preset has a plan on any number of ranks that its step can feed", "[cli]") {
    for (const char* ranks : {"1", "48", "64", "512"}) {
        const Outcome outcome = check_succeeds(train_gpt_with(
            {"plan", "configs/gpt2-124m.json", "--set", "device=cpu", "--world", ranks}));
        CHECK(contains(outcome.out, concat("on ", ranks, " rank")));
    }
    check_refused(train_gpt_with({"plan", "configs/gpt2-124m.json", "--world", "1024"}), 1,
                  {"512 sequences cannot feed 1024 ranks", "take 512 ranks",
                   "batch.tokens_per_step=1048576"});
}

TEST_CASE("the plan of a run with Muon says what its iteration costs, and a run measures it",
          "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const Arguments muon{"--set", "optimizer.name=muon"};
    const auto plan = [&](Arguments more) {
        Arguments all{"plan", w.config(), "--set", "run_dir=" + directory.path()};
        all.insert(all.end(), muon.begin(), muon.end());
        all.insert(all.end(), more.begin(), more.end());
        return check_succeeds(train_gpt_with(all)).out;
    };
    // By the formula of docs/optimizers.md, for each matrix of a block
    const Config config = load_config(w.config(), {});
    const DecoderSpec spec = spec_of(config, vocab_size_of(config));
    const auto of = [](double m, double n) {
        if (m > n) std::swap(m, n);
        return 3 * m * m * n + m * m * m;
    };
    const double C = spec.n_embd, F = spec.layer(0).n_ff;
    REQUIRE(spec.n_kv_head == spec.n_head);
    REQUIRE_FALSE(spec.layer(0).is_gated());
    const double all = 5 * spec.n_layer * (4 * of(C, C) + 2 * of(C, F));
    CHECK(number_after(plan({}), "matrices, ") == Approx(all).epsilon(1e-3));
    // Without A², a step has no m³.
    const double cubic =
        5 * spec.n_layer *
        (4 * (of(C, C) - C * C * C) + 2 * (of(C, F) - std::pow(std::min(C, F), 3)));
    CHECK(number_after(plan({"--set", "optimizer.muon_coefficients=cubic"}), "matrices, ") ==
          Approx(cubic).epsilon(1e-3));
    Arguments options = muon;
    options.insert(options.end(), {"--stop-at", "6", "--profile", "2"});
    const std::string out = check_succeeds(train_gpt_with(w.train(directory / "run", options))).out;
    for (const char* row : {"newton_schulz", "muon_momentum", "muon_update"})
        CHECK(contains(out, row));
}

TEST_CASE("a plan draws the schedule of its pipeline into a file, or says why not", "[cli]") {
    const TemporaryDirectory directory;
    const auto plan = [](const char* ranks, const std::string& file) {
        return train_gpt_with({"plan", "configs/gpt2-124m.json", "--set", "device=cpu", "--set",
                               "model.n_layer=4", "--set", "batch.micro_batch=4", "--set",
                               concat("parallel.pipeline=", ranks), "--world", ranks, "--picture",
                               file});
    };
    const std::string file = directory / "schedule.svg";
    CHECK(contains(check_succeeds(plan("4", file)).out, concat("wrote ", file)));
    const std::string svg = read(file);
    CHECK(svg.rfind("<svg ", 0) == 0);
    CHECK(contains(svg, "Pipeline of 4 ranks: 1f1b"));
    CHECK(contains(svg, "4 stages, 128 micro-batches"));
    check_refused(plan("1", file), 1, {"parallel.pipeline is 1", "set it to 2 or more"});
    check_refused(plan("4", directory / "missing/schedule.svg"), 1, {"missing/schedule.svg"});
}

TEST_CASE("a plan on a cluster predicts a step, searches for faster ways, and writes a trace",
          "[cli][plan]") {
    const TemporaryDirectory directory;
    const auto plan = [](const Arguments& more) {
        Arguments all{"plan",  "configs/llama3.2-1b.json", "--cluster", "h100-dgx",
                      "--set", "batch.micro_batch=1",      "--set",     "memory.recompute=none"};
        all.insert(all.end(), more.begin(), more.end());
        return train_gpt_with(all);
    };
    const std::string text = check_succeeds(plan({"--world", "16"})).out;
    for (const char* part : {"predicted on h100-dgx", "tokens/s of a rank", "bounded by",
                             "exchanges along data", "GPU-hours"})
        CHECK(contains(text, part));
    CHECK_FALSE(contains(text, "cost"));
    // One object, and nothing else
    const std::string file = directory / "step.json";
    const std::string line =
        check_succeeds(plan({"--world", "16", "--json", "--price", "2", "--trace", file})).out;
    const SortedJson json = SortedJson::parse(line);
    CHECK(json["cost"].get<double>() == Approx(2 * json["gpu_hours"].get<double>()));
    CHECK(json["exposed_communication_ms"]["data"].get<double>() > 0);
    CHECK(SortedJson::parse(read(file))["traceEvents"].size() > 100);
    const SortedJson found =
        SortedJson::parse(check_succeeds(plan({"--world", "16", "--search", "--json"})).out);
    CHECK(found["best"].size() == 10);
    // fp8's step is shorter.
    const SortedJson in_fp8 = SortedJson::parse(
        check_succeeds(plan({"--world", "16", "--json", "--set", "precision.fp8=delayed"})).out);
    CHECK(in_fp8["step_ms"].get<double>() < json["step_ms"].get<double>());
    // This machine is measured.
    const Arguments here{
        "plan",  "configs/gpt2-10m.json", "--cluster", "this", "--set", "device=cpu",
        "--set", "tokenizer.path=",       "--world",   "2",    "--json"};
    const SortedJson of_here = SortedJson::parse(check_succeeds(train_gpt_with(here)).out);
    CHECK(of_here["step_ms"].get<double>() > 0);
    CHECK(contains(of_here["notes"].dump(), "assumed"));
#ifdef TRAIN_GPT_CUDA
    // --gpu predicts with a shipped cluster of this GPU.
    const auto on = [](const char* gpu) {
        return check_succeeds(train_gpt_with({"plan", "configs/gpt2-124m.json", "--gpu", gpu})).out;
    };
    CHECK(contains(on("b200"), "predicted on b200"));
    CHECK(contains(on("h100"), "predicted on h100-dgx"));
    CHECK_FALSE(contains(on("rtx3090"), "predicted"));
    // The plan is the one whose time is predicted: both choose by the cluster's link, which here
    // makes another choice than the link of a node with NVLink.
    const auto total_on = [](const std::string& option) {
        const std::string out =
            check_succeeds(
                train_gpt_with({"plan", "gpt2-1558m", option, "rtx4090", "--world", "8", "--set",
                                "parallel.zero=auto", "--set", "data.train=synthetic", "--set",
                                "model.vocab_size=50257", "--set", "tokenizer.path="}))
                .out;
        std::smatch found;
        REQUIRE(std::regex_search(out, found, std::regex("checkpoint.async = [a-z]+: ([0-9.]+)")));
        CHECK(contains(out, "predicted on rtx4090: "));
        return found[1].str();
    };
    CHECK(total_on("--gpu") == total_on("--cluster"));
    // In fp8 each plan for a GPU says from which width that pays, also where no time is predicted.
    const auto in_fp8_on = [](const Arguments& more) {
        return check_succeeds(train_gpt_with(Arguments{"plan", "configs/gpt2-124m.json", "--set",
                                                       "precision.fp8=delayed"} +
                                             more))
            .out;
    };
    const std::string known = "note         fp8 pays from a width of ",
                      unknown = "note         from which width fp8 pays is not known for ";
    CHECK(contains(in_fp8_on({"--memory", "24GiB"}), unknown + "this GPU"));
    CHECK(contains(in_fp8_on({"--gpu", "rtx4090", "--memory", "20GiB"}), known));
    CHECK(contains(in_fp8_on({"--gpu", "l40s"}), known));
    const std::string not_predicted =
        in_fp8_on({"--gpu", "h100", "--world", "16", "--set", "parallel.tensor=16", "--set",
                   "model.n_head=16", "--set", "model.n_embd=1024"});
    CHECK(contains(not_predicted, "the time of a step is not predicted: "));
    CHECK(contains(not_predicted, known));
    if (!skip_without_gpus(1) && architecture({Device::Kind::cuda, 0}) >= 89) {
        const std::string here = in_fp8_on({"--set", "device=cuda"});
        CHECK(contains(here, known) != contains(here, unknown));
    }
#endif
    check_refused(plan({"--world", "12"}), 1, {"whole nodes", "8 and 16"});
    check_refused(train_gpt_with({"plan", "configs/gpt2-124m.json", "--cluster", "h100"}), 1,
                  {"\"h100\"", "h100-dgx"});
    check_refused(train_gpt_with({"plan", "configs/gpt2-124m.json", "--cluster", "a100-80", "--set",
                                  "precision.fp8=delayed", "--set", "batch.micro_batch=4"}),
                  1, {"a100-80 (sm_80)", "no tensor cores for fp8"});
    check_refused(train_gpt_with({"plan", "configs/gpt2-124m.json", "--price", "2"}), 2,
                  {"--price", "--cluster"});
}

#ifdef TRAIN_GPT_CUDA

TEST_CASE("what a plan for a GPU with too little memory advises fits", "[cli][plan]") {
    const auto plan = [](const Arguments& more) {
        return train_gpt_with(Arguments{"plan", "configs/gpt2-124m.json", "--set",
                                        "batch.micro_batch=16", "--set", "memory.recompute=none",
                                        "--set", "memory.offload=none"} +
                              more);
    };
    // The first of ever smaller memories that is too small: the run needs at most twice as much.
    Arguments of_gpu;
    Outcome outcome;
    for (int gib = 64; gib > 0 && outcome.code == 0; gib /= 2) {
        of_gpu = {"--memory", concat(gib, "GiB")};
        outcome = plan(of_gpu);
    }
    CAPTURE(of_gpu, outcome.out, outcome.err);
    check_refused(outcome, 1, {"the run needs ", "it fits with --set "});
    CHECK(contains(outcome.out, "DOES NOT FIT"));
    const size_t advice = outcome.err.find("it fits with ");
    REQUIRE(advice != std::string::npos);
    Arguments advised;
    std::istringstream words(outcome.err.substr(advice));
    for (std::string word, before; words >> word; before = word) {
        if (before != "--set") continue;
        std::erase(word, '\'');  // the shell's
        advised.insert(advised.end(), {"--set", word});
    }
    REQUIRE_FALSE(advised.empty());
    CHECK_FALSE(contains(check_succeeds(plan(of_gpu + advised)).out, "DOES NOT FIT"));
}

#endif
