// train_gpt train: what a run shows and leaves behind; stopped, killed and resumed.
#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <fstream>
#include <map>
#include <regex>

#include "device/processor.h"
#include "test/commands/program.h"
#include "training/files/safetensors.h"

using namespace train_gpt;

TEST_CASE(
    "a run ends with a checkpoint, an evaluation and samples, and its folder says what it was",
    "[cli][cuda]") {
    const fs::path run = finished_run();
    CHECK(checkpoints_in(run) == std::vector<int64_t>{4, 8, 12});
    const auto metrics = metrics_of(run);
    REQUIRE(metrics.size() == 12 + 4);  // evaluated at the start and after steps 5, 10 and 12
    CHECK(metrics.back()["step"].get<int>() == 12);
    CHECK(metrics.back()["val_loss"].get<double>() < metrics[0]["val_loss"].get<double>());
    CHECK(SortedJson::parse(read(run / "config.json"))["run_dir"].get<std::string>() ==
          run.string());
    const SortedJson manifest = SortedJson::parse(read(run / "manifest.json"));
    const SortedJson data = SortedJson::parse(read(Workplace::get().data("data.json")));
    CHECK(manifest["train"][0]["xxh3"].dump() == data["files"][0]["hash"].dump());
    for (const char* key : {"program", "host", "seed"}) CHECK(manifest.contains(key));

    // The same command again finds nothing left to do.
    const auto before = read(run / "metrics.jsonl");
    const Outcome again = check_succeeds(
        train_gpt_with(Workplace::get().train(run, {"--set", "checkpoint.every=4"})));
    CHECK(again.out.starts_with("already complete: step 12 is saved in " + run.string()));
    CHECK_FALSE(contains(again.out, "training "));
    CHECK(number_after(again.out, "step 12: validation loss ") ==
          Approx(metrics.back()["val_loss"].get<double>()).epsilon(1e-5));
    CHECK(read(run / "metrics.jsonl") == before);
}

TEST_CASE("a run on a GPU says what runs attention, and why not cuDNN", "[cli][cuda]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    const Outcome outcome = check_succeeds(
        train_gpt_with(w.train(run, {"--stop-at", "1", "--set", "kernels.attention=own", "--set",
                                     "kernels.deterministic=off"})));
    const bool on_gpu = !contains(outcome.out, cpu_info().model);
    CHECK(contains(outcome.out, "attention: own kernels, ") == on_gpu);
    const SortedJson manifest = SortedJson::parse(read(run / "manifest.json"));
    CHECK(manifest.value("attention", "") == (on_gpu ? "own" : ""));
    CHECK(contains(outcome.out, "kernels.deterministic is off, which changes nothing here"));
    for (const fs::path& folder : {run, run / step_folder(1)})
        CHECK(SortedJson::parse(read(folder / "manifest.json")).at("deterministic") == true);
    std::vector<std::string> engines;
    for (const SortedJson& line : metrics_of(run))
        if (line.contains("loss")) engines.push_back(line.value("attention", ""));
    CHECK(engines == std::vector<std::string>{on_gpu ? "own" : ""});
}

namespace {

/// All weights of a run's checkpoint, by name: dimensions and values.
std::map<std::string, std::pair<size_t, std::vector<float>>> weights_of(const fs::path& run,
                                                                        int64_t step) {
    const SafetensorsFile file(run / step_folder(step) / "model.safetensors");
    std::map<std::string, std::pair<size_t, std::vector<float>>> weights;
    for (const TensorInfo& info : file.tensors()) {
        auto& [dimensions, values] = weights[info.name];
        dimensions = info.shape.size();
        values.resize(static_cast<size_t>(info.numel()));
        file.read_floats(info, values.data());
    }
    return weights;
}

}  // namespace

TEST_CASE("the updates of a run are AdamW's, with the configuration's numbers at every step",
          "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const auto start = weights_of(finished_run(), 12);
    const auto run = [&](const std::string& name, const Arguments& more) {
        const Arguments from_start{"--set", "model.init_from=" + finished_run(),
                                   "--set", "checkpoint.every=1",
                                   "--set", "evaluation.every=0"};
        check_succeeds(train_gpt_with(w.train(directory / name, from_start + more)));
        return fs::path(directory / name);
    };

    // Warm-up to the peak over 4 steps, then decay to zero at the last step.
    const double peak = 0.02, decay = 2.5;
    const fs::path whole = run(
        "whole", {"--set", "schedule.decay=linear", "--set", "schedule.warmup_steps=4", "--set",
                  "schedule.final_fraction=0", "--set", concat("optimizer.learning_rate=", peak),
                  "--set", concat("optimizer.weight_decay=", decay), "--set", "optimizer.beta1=0",
                  "--set", "optimizer.beta2=0.999", "--set", "optimizer.epsilon=1e-30"});
    std::vector<double> rates;
    for (const SortedJson& line : metrics_of(whole))
        if (line.contains("loss")) rates.push_back(line.at("learning_rate").get<double>());
    REQUIRE(rates.size() == 12);
    for (int step = 1; step <= 12; ++step)
        CHECK(rates[static_cast<size_t>(step - 1)] ==
              Approx(peak * (step <= 4 ? step / 4.0 : (12 - step) / 8.0)).margin(1e-9));

    // How far each weight moved in addition to its decay (which only matrices have), in learning
    // rates. With beta1 = 0 that is 1 in the first step, for any gradient, and g2 / sqrt((g1^2 +
    // g2^2) / 2) in the second.
    const auto moves = [&](const auto& before, int64_t step) {
        std::vector<double> all;
        const double rate = rates[static_cast<size_t>(step - 1)];
        for (const auto& [name, now] : weights_of(whole, step)) {
            const auto& [dimensions, values] = before.at(name);
            for (size_t i = 0; i < values.size(); ++i) {
                const double kept = values[i] * (dimensions > 1 ? 1 - rate * decay : 1);
                all.push_back(std::abs(now.second[i] - kept) / rate);
            }
        }
        return all;
    };
    const auto first = moves(start, 1), second = moves(weights_of(whole, 1), 2);
    size_t moved = 0;
    for (const double move : first) {
        if (move > 0.5) ++moved;
        if (move > 1e-3 && std::abs(move - 1) > 1e-3) FAIL_CHECK("moved by " << move << " rates");
    }
    CHECK(moved > first.size() / 2);  // others have no gradient
    const double farthest = *std::max_element(second.begin(), second.end());
    CHECK(farthest < 1.42);
    CHECK(farthest > 1.2);

    // With a large epsilon, the update is a multiple of the clipped gradient.
    const fs::path clipped = run(
        "clipped", {"--set", "schedule.warmup_steps=0", "--set", "schedule.decay=constant", "--set",
                    "optimizer.learning_rate=1", "--set", "optimizer.weight_decay=0", "--set",
                    "optimizer.epsilon=1", "--set", "optimizer.grad_clip=0.001", "--stop-at", "1"});
    CHECK(metrics_of(clipped).front().at("grad_norm").get<double>() > 0.01);
    double square = 0;
    for (const auto& [name, now] : weights_of(clipped, 1))
        for (size_t i = 0; i < now.second.size(); ++i)
            square += std::pow(now.second[i] - start.at(name).second[i], 2);
    CHECK(std::sqrt(square) == Approx(0.001).epsilon(0.01));
}

TEST_CASE("every field of metrics.jsonl is documented", "[cli]") {
    const std::string page = read("docs/running.md");
    int fields = 0;
    for (const SortedJson& line : metrics_of(finished_run()))
        for (const auto& [field, value] : line.items()) {
            INFO(field);
            CHECK(contains(page, "`" + field + "`"));
            ++fields;
        }
    CHECK(fields > 10);
}

TEST_CASE("a run shows each step and its samples as it goes", "[cli]") {
    const TemporaryDirectory directory;
    const Arguments options{"--set", "schedule.steps=5",    "--set", "sampling.every=2",
                            "--set", "sampling.samples=3",  "--set", "sampling.top_k=1",
                            "--set", "sampling.prompt=abc", "--set", "evaluation.every=0"};
    const auto show = [&](const std::string& progress) {
        return check_succeeds(train_gpt_with(Workplace::get().train(
                                  directory / progress,
                                  options + Arguments{"--set", "log.progress=" + progress})))
            .out;
    };
    const auto count = [](const std::string& text, const std::string& pattern) {
        const std::regex regex(pattern);
        return std::distance(std::sregex_iterator(text.begin(), text.end(), regex), {});
    };
    const std::string step =
        R"(step [1-5]/5 \| loss \d\.\d{4} \| norm \d+\.\d{3} \| lr \d\.\d\de-\d\d \| [\d.]+ ms)"
        R"( \| \d+ tok/s \| [\d.]+ TFLOP/s \| \d+% of peak \| [\d.]+ \w+ \| ETA \d+:\d\d)";
    const std::string lines = show("lines"), line = show("line");
    CHECK(count(lines, step + "\n") == 5);
    CHECK_FALSE(contains(lines, "\r"));
    CHECK(count(line, step) == 5);
    CHECK(count(line, "\r[^\n]*" + step) > 0);
    // One sample after steps 2 and 4, three at the end; top_k = 1 leaves no choice.
    CHECK(count(lines, "--- sample\nabc") == 5);
    std::string last = lines.substr(lines.rfind("--- sample"));
    last = last.substr(0, last.rfind("step 5 of 5"));
    CHECK(contains(lines, last + last + last));
}

TEST_CASE("a run is as long as its steps, tokens or passes over the data say", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const auto steps = [&](const std::string& name, const std::string& length) {
        check_succeeds(train_gpt_with(
            w.train(directory / name, {"--set", "schedule.steps=0", "--set", length})));
        return checkpoints_in(directory / name).back();
    };
    CHECK(steps("tokens", "schedule.tokens=1025") == 5);  // of 256 tokens each
    const SortedJson data = SortedJson::parse(read(w.data("data.json")));
    int64_t windows = 0;
    for (const SortedJson& file : data["files"])
        if (file["split"] == "train") windows += (file["tokens"].get<int64_t>() - 1) / 32;
    CHECK(steps("passes", "schedule.epochs=2") == (2 * windows + 7) / 8);
}

TEST_CASE("the z-loss changes a run's gradients, and not the losses that it reports",
          "[cli][cuda]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const auto run = [&](const char* z_loss) {
        const Arguments options{"--set", concat("optimizer.z_loss=", z_loss), "--set",
                                "evaluation.every=0"};
        check_succeeds(train_gpt_with(w.train(directory / z_loss, options)));
        return metrics_of(directory / z_loss);
    };
    const std::vector<SortedJson> without = run("0"), little = run("1e-4"), much = run("1");
    const auto first = [](const std::vector<SortedJson>& metrics, const char* key) {
        return metrics.front().at(key).get<double>();
    };
    // The first step's weights are the same, and the loss is the cross-entropy alone.
    CHECK(first(little, "loss") == first(without, "loss"));
    CHECK(first(much, "loss") == first(without, "loss"));
    // The first gradient is (1 + 2·z·lse)·softmax − onehot with lse ≈ log of the vocabulary, so
    // the z-loss adds the more the larger it is.
    CHECK(first(little, "grad_norm") != first(without, "grad_norm"));
    CHECK(first(much, "grad_norm") > 2 * first(without, "grad_norm"));
}

namespace {

const char* random_family() {
    return std::array{"llama", "qwen2", "qwen3", "mistral"}[static_cast<size_t>(random_int(0, 3))];
}
const char* random_dtype() { return random_int(0, 1) ? "bf16" : "fp32"; }

}  // namespace

TEST_CASE("k steps, a stop and the rest equal all steps at once, bit for bit", "[cli][cuda]") {
    const Workplace& w = Workplace::get();
    for (const auto& [family, dtype] :
         {std::pair("gpt2", "fp32"), {"gpt2", "bf16"}, {random_family(), random_dtype()}}) {
        const TemporaryDirectory directory;
        const Surroundings two_threads{
            .environment = {"OMP_NUM_THREADS=2", "OMP_WAIT_POLICY=passive"}};
        const Arguments options{
            "--set", concat("model.family=", family),   "--set", "model.head_size=16",
            "--set", concat("precision.dtype=", dtype), "--set", "memory.recompute=elementwise"};
        check_succeeds(train_gpt_with(w.train(directory / "whole", options), two_threads));
        const std::string stop = std::to_string(random_int(1, 11));
        CAPTURE(family, dtype, stop);
        const auto stopped = check_succeeds(train_gpt_with(
            w.train(directory / "parts", options + Arguments{"--stop-at", stop}), two_threads));
        CHECK(contains(stopped.out, "without --stop-at"));
        CHECK(checkpoints_in(directory / "parts") == std::vector<int64_t>{std::stoll(stop)});
        // A stop that has already been reached is still a stop.
        check_succeeds(train_gpt_with(
            w.train(directory / "parts", options + Arguments{"--stop-at", stop}), two_threads));
        CHECK(checkpoints_in(directory / "parts").size() == 1);
        check_succeeds(train_gpt_with(w.train(directory / "parts", options), two_threads));
        check_same_state(directory / "whole", directory / "parts", 12);
    }
}

TEST_CASE("a run on masked documents of two sources reports each, and resumes as it was",
          "[cli][cuda]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    // Every third line ends a document; the second source has only capitals.
    std::string small, capital;
    int lines = 0;
    for (const char c : read(w.text())) {
        small += c;
        capital += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
        if (c != '\n' || ++lines % 3 != 0) continue;
        small += "<|endoftext|>\n";
        capital += "<|endoftext|>\n";
    }
    const auto tokenize = [&](const std::string& name, const std::string& text) {
        write(directory / name, text);
        check_succeeds(
            train_gpt_with({"tokenize", directory / name, "--tokenizer", w.data("tokenizer.json"),
                            "--out", directory / (name + "-data")}));
        return directory / (name + "-data/train_*.bin");
    };
    const SortedJson sources = {
        {{"glob", tokenize("small", small)}, {"weight", 3}, {"name", "small"}},
        {{"glob", tokenize("capital", capital)}, {"name", "capital"}}};
    const Arguments options{"--set", "data.train=" + sources.dump(),
                            "--set", "data.document_mask=true",
                            "--set", "data.val=" + (directory / "small-data/val_*.bin")};
    const auto whole = check_succeeds(train_gpt_with(w.train(directory / "whole", options)));
    CHECK(contains(whole.out, " passes over capital"));
    double tokens_before[2] = {};
    int steps = 0;
    for (const SortedJson& line : metrics_of(directory / "whole")) {
        if (!line.contains("loss")) continue;
        ++steps;
        double loss = 0, tokens = 0;
        int i = 0;
        for (const std::string name : {"small", "capital"}) {
            const double seen = line.at("tokens/" + name).get<double>() - tokens_before[i];
            tokens_before[i++] += seen;
            tokens += seen;
            if (seen > 0) loss += seen * line.at("loss/" + name).get<double>();
        }
        CHECK(tokens == 256);
        CHECK(loss / tokens == Approx(line.at("loss").get<double>()).epsilon(1e-5));
    }
    CHECK(steps == 12);
    CHECK(tokens_before[0] / (12 * 256) == Approx(0.75).margin(0.15));

    check_succeeds(
        train_gpt_with(w.train(directory / "parts", options + Arguments{"--stop-at", "5"})));
    check_succeeds(train_gpt_with(w.train(directory / "parts", options)));
    check_same_state(directory / "whole", directory / "parts", 12);

    // A model trained with a document mask is evaluated with it.
    const auto eval = check_succeeds(train_gpt_with({"eval", directory / "whole"}));
    CHECK(number_after(eval.out, "validation loss ") ==
          Approx(number_after(whole.out, "step 12: validation loss ")).epsilon(1e-5));
    check_succeeds(train_gpt_with(
        w.train(directory / "plain", options + Arguments{"--set", "data.document_mask=false"})));
    const auto losses = [&](const std::string& run) {
        std::vector<double> all;
        for (const SortedJson& line : metrics_of(directory / run))
            if (line.contains("loss")) all.push_back(line["loss"].get<double>());
        return all;
    };
    CHECK(losses("plain") != losses("whole"));

    check_refused(train_gpt_with(w.train(directory / "none",
                                         options + Arguments{"--set", "tokenizer.path=", "--set",
                                                             "model.vocab_size=300"})),
                  1, {"data.document_mask", "tokenizer.path"});
}

TEST_CASE(
    "SIGINT, SIGTERM, SIGUSR1 and SIGHUP end after a checkpoint from which the same command "
    "resumes",
    "[cli][cuda]") {
    const Workplace& w = Workplace::get();
    for (const auto& [number, name] : {std::pair{SIGINT, "SIGINT"},
                                       {SIGTERM, "SIGTERM"},
                                       {SIGUSR1, "SIGUSR1"},
                                       {SIGHUP, "SIGHUP"}}) {
        const TemporaryDirectory directory;
        const std::string run = directory / "run";
        int64_t done = 0;
        {
            Process process(w.train(run, endless));
            REQUIRE(process.wait_for_step(3));
            process.signal(number);
            const Outcome outcome = check_stopped(process.finish(), number == SIGINT ? 130 : 75);
            CAPTURE(outcome.out);
            CHECK(contains(outcome.out, std::string(name) + ": step "));
            CHECK(contains(outcome.out, "the same command resumes"));
            REQUIRE(checkpoints_in(run).size() == 1);
            done = checkpoints_in(run)[0];
            CHECK(done >= 3);
        }
        const std::string stop = std::to_string(done + 4);
        check_succeeds(train_gpt_with(w.train(run, endless + Arguments{"--stop-at", stop})));
        check_succeeds(
            train_gpt_with(w.train(directory / "whole", endless + Arguments{"--stop-at", stop})));
        check_same_state(directory / "whole", run, done + 4);
    }
}

TEST_CASE("a signal during an evaluation ends it after a checkpoint", "[cli][cuda]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    const Arguments options{"--set", "data.val=synthetic", "--set", "evaluation.every=2"};
    const Arguments shorter = options + Arguments{"--set", "evaluation.max_tokens=200"};
    check_succeeds(train_gpt_with(w.train(run, shorter + Arguments{"--stop-at", "1"})));
    {
        Process process(w.train(run, options));
        REQUIRE(process.wait_for_step(2));  // a long evaluation follows it
        process.signal(SIGTERM);
        const Outcome outcome = check_stopped(process.finish());
        CHECK(contains(outcome.out, "SIGTERM: step 2 of 12 is saved"));
    }
    CHECK(checkpoints_in(run) == std::vector<int64_t>{1, 2});
    CHECK_FALSE(metrics_of(run).back().contains("val_loss"));
    // The missing evaluation is done when the run resumes, and only once.
    const Arguments stop{"--stop-at", "3"};
    for (int i = 0; i < 2; ++i) check_succeeds(train_gpt_with(w.train(run, shorter + stop)));
    check_succeeds(train_gpt_with(w.train(directory / "whole", shorter + stop)));
    CHECK(metrics_of(run) == metrics_of(directory / "whole"));
    CHECK(metrics_of(run).size() == 5);  // evaluated at 0 and 2
    // The same holds for the last evaluation, for which the run resumes.
    {
        Process process(w.train(run, options + Arguments{"--set", "evaluation.every=0"}));
        REQUIRE(process.wait_for_step(12));
        process.signal(SIGTERM);
        CHECK(contains(check_stopped(process.finish()).out, "continues with its evaluation"));
    }
    check_succeeds(train_gpt_with(w.train(run)));
    CHECK(metrics_of(run).back().contains("val_loss"));
}

TEST_CASE("a run continues when the reader of its output goes away", "[cli]") {
    const TemporaryDirectory directory;
    std::string command = binary();
    for (const std::string& argument : Workplace::get().train(directory / "run"))
        command += " '" + argument + "'";
    run_program({"sh", "-c", command + " | head -n 1"});
    CHECK(checkpoints_in(directory / "run") == std::vector<int64_t>{12});
}

TEST_CASE("one run at a time writes into a folder, and a second signal ends it immediately",
          "[cli]") {
    const TemporaryDirectory directory;
    // The first step lasts longer than the test.
    const Arguments arguments = Workplace::get().train(
        directory / "run",
        {"--set", "batch.tokens_per_step=268435456", "--set", "evaluation.every=0"});
    Process process(arguments);
    REQUIRE(process.wait_until([&] { return contains(process.out(), "training "); }));
    check_refused(train_gpt_with(arguments), 1, {"another run", directory / "run"});
    process.signal(SIGINT);
    REQUIRE(process.wait_until([&] { return contains(process.err(), "second signal"); }));
    process.signal(SIGTERM);
    const Outcome ended = process.finish();
    CHECK(ended.code == 3);
    CHECK(contains(ended.err,
                   "ended at once: only the step that was being computed is lost; nothing was "
                   "saved, and the same command starts the run again"));
    // Nothing was saved, and the lock disappeared with the process.
    CHECK(checkpoints_in(directory / "run").empty());
    check_succeeds(train_gpt_with(Workplace::get().train(directory / "run", {"--stop-at", "1"})));
}

TEST_CASE("a killed run resumes from its newest checkpoint as if it had not been killed", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    const Arguments options =
        endless + Arguments{"--set", "checkpoint.every=7", "--set", "checkpoint.keep=2"};
    const bool in_background = random_int(0, 1);
    Process process(w.train(
        run,
        options + Arguments{"--set", concat("checkpoint.async=", in_background ? "on" : "off")}));
    REQUIRE(process.wait_for_step(random_int(15, 40)));
    const auto newest_checkpoint = [&] {
        int64_t newest = 0;
        for (const std::string& name : names_in(run))
            if (name.starts_with("step-") && !name.ends_with(".tmp"))
                newest = std::max<int64_t>(newest, std::stoll(name.substr(5)));
        return newest;
    };
    if (in_background) REQUIRE(process.wait_until([&] { return newest_checkpoint() > 0; }));
    process.signal(SIGKILL);
    CHECK(process.finish().code == -SIGKILL);
    {
        // What a kill in the middle of a write leaves behind.
        std::ofstream(run + "/metrics.jsonl", std::ios::app) << R"({"step": 9999999, "lo)";
        fs::create_directory(run + "/step-99999999.tmp");
    }
    const int64_t newest = newest_checkpoint();
    REQUIRE(newest >= (in_background ? 7 : 14));
    const Arguments stop{"--stop-at", std::to_string(newest + 9)};
    const Outcome outcome = check_succeeds(train_gpt_with(w.train(run, options + stop)));
    CHECK(contains(outcome.out, "resuming from " + run + "/" + step_folder(newest)));
    CHECK(checkpoints_in(run) == std::vector<int64_t>{newest + 7, newest + 9});
    check_succeeds(train_gpt_with(w.train(directory / "whole", options + stop)));
    check_same_state(directory / "whole", run, newest + 9);
}

TEST_CASE("tokenize ends cleanly at SIGINT and SIGTERM, and the same command resumes", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    std::string lines;
    for (int i = 0; i < 600; ++i)
        lines += SortedJson{{"body", read(w.text()).substr(static_cast<size_t>(i))}}.dump() + "\n";
    write(directory / "a.jsonl", lines + "no JSON\n");
    const Arguments options{"--field",        "body", "--tokenizer", w.data("tokenizer.json"),
                            "--val-fraction", "0.2",  "--skip-bad",  "--out"};
    const auto tokenize = [&](const std::string& out) {
        return Arguments{"tokenize", directory / "a.jsonl"} + options + Arguments{out};
    };
    const Outcome whole = check_succeeds(train_gpt_with(tokenize(directory / "whole")));
    CHECK(contains(whole.out, "1 line that is not valid JSON, first line 601 of"));
    for (const auto& [number, code] : {std::pair{SIGINT, 130}, {SIGTERM, 75}}) {
        const std::string out = directory / std::to_string(number);
        Process process(tokenize(out));
        REQUIRE(process.wait_until([&] { return contains(process.out(), "tokenizer: "); }));
        process.signal(number);
        const Outcome stopped = process.finish();
        INFO(stopped.out << stopped.err);
        CHECK(stopped.code == code);
        CHECK(contains(stopped.out, "the same command resumes from there"));
        CHECK_FALSE(fs::exists(out + "/data.json"));
        CHECK(contains(check_succeeds(train_gpt_with(tokenize(out))).out, "continuing after"));
        for (const char* name : {"/train_000000.bin", "/val_000000.bin", "/data.json"})
            CHECK(file_difference(out + name, directory / "whole" + name) == "");
    }
}

TEST_CASE("a run ends after a checkpoint when its time is up", "[cli]") {
    const TemporaryDirectory directory;
    const Outcome outcome = check_stopped(train_gpt_with(Workplace::get().train(
        directory / "run", endless + Arguments{"--set", "schedule.max_minutes=0.001"})));
    CHECK(contains(outcome.out, "schedule.max_minutes"));
    CHECK(contains(outcome.out, "the same command resumes"));
    CHECK(checkpoints_in(directory / "run").size() == 1);
}

TEST_CASE(
    "a run with init_from starts at step 1 with the weights of a checkpoint and a fresh optimizer",
    "[cli]") {
    const TemporaryDirectory directory;
    const Arguments options{"--set",     "model.init_from=" + finished_run(),
                            "--set",     "optimizer.learning_rate=1e-30",
                            "--stop-at", "1"};
    const Outcome outcome =
        check_succeeds(train_gpt_with(Workplace::get().train(directory / "run", options)));
    CHECK(contains(outcome.out,
                   "starting from the weights of " + finished_run() + "/" + step_folder(12)));
    CHECK(contains(outcome.out, "step 1/12"));
    CHECK(file_difference(directory / "run" + "/" + step_folder(1) + "/model.safetensors",
                          finished_run() + "/" + step_folder(12) + "/model.safetensors") == "");
    check_refused(train_gpt_with(Workplace::get().train(
                      directory / "other", options + Arguments{"--set", "model.n_layer=3"})),
                  1, {"n_layer = 2", "3"});
    check_refused(train_gpt_with(Workplace::get().train(
                      directory / "other", options + Arguments{"--set", "model.family=llama"})),
                  1, {"is of the family gpt2", "configuration's is llama", "model.init_from"});
}

TEST_CASE("checkpoints keep the ids of tokens of the model that their run began with", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path source = directory / "source", run = directory / "run";
    check_succeeds(train_gpt_with({"export", finished_run(), "--out", source}));
    SortedJson config = SortedJson::parse(read(source / "config.json"));
    const SortedJson end = config["eos_token_id"], ends = {5, end, 1000000};
    REQUIRE(end.is_number());
    config.update({{"eos_token_id", ends}, {"pad_token_id", 3}, {"bos_token_id", 4}});
    write(source / "config.json", config.dump());
    // Every token, so that no sample has any
    SortedJson every = SortedJson::array();
    for (int id = 0; id < 300; ++id) every.push_back(id);
    const std::string generation = SortedJson({{"eos_token_id", every}, {"top_p", 0.5}}).dump();
    write(source / "generation_config.json", generation);

    const Arguments from{"--set", "model.init_from=" + source.string(),
                         "--set", "sampling.prompt=ab",
                         "--set", "sampling.every=1"};
    const Outcome first =
        check_succeeds(train_gpt_with(w.train(run, from + Arguments{"--stop-at", "2"})));
    CHECK(contains(first.out, "--- sample\nab\n"));
    check_succeeds(train_gpt_with(w.train(run, from + Arguments{"--stop-at", "3"})));
    check_succeeds(train_gpt_with({"export", run, "--out", directory / "out"}));
    for (const fs::path& folder :
         {run / step_folder(2), run / step_folder(3), fs::path(directory / "out")}) {
        CAPTURE(folder.string());
        const SortedJson kept = SortedJson::parse(read(folder / "config.json"));
        CHECK(kept["eos_token_id"] == ends);
        CHECK(kept["pad_token_id"] == 3);
        CHECK(kept["bos_token_id"] == 4);
        CHECK(read(folder / "generation_config.json") == generation);
        CHECK(check_succeeds(train_gpt_with({"sample", folder, "--prompt", "ab"})).out == "ab\n");
    }
}

TEST_CASE("a vocabulary larger than the tokenizer's is noted once, at the start of a new run",
          "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string note = "note: model.vocab_size is 3000, but the tokenizer has 300 tokens";
    const auto said = [&](const Arguments& more) {
        return check_succeeds(train_gpt_with(w.train(directory / "run", more))).out;
    };
    const Arguments large{"--set", "model.vocab_size=3000"};
    CHECK(contains(said(large + Arguments{"--stop-at", "1"}), note));
    CHECK_FALSE(contains(said(large + Arguments{"--stop-at", "2"}), note));  // too late
}

TEST_CASE("a vocabulary that differs from the data's or the checkpoint's is refused", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    // The same number of tokens, but different ones.
    const size_t vocabulary =
        SortedJson::parse(read(w.data("data.json")))["vocab_size"].get<size_t>();
    std::string text = read(w.text());
    std::ranges::reverse(text);
    write(directory / "text", text);
    check_succeeds(train_gpt_with({"tokenize", directory / "text", "--train-vocab",
                                   std::to_string(vocabulary), "--out", directory / "data"}));
    const Arguments theirs{"--set", "tokenizer.path=" + (directory / "data/tokenizer.json")};
    const Arguments all_theirs =
        theirs + Arguments{"--set", "data.train=" + (directory / "data/train_*.bin"), "--set",
                           "data.val=" + (directory / "data/val_*.bin")};
    check_refused(train_gpt_with(w.train(directory / "run", theirs)), 1,
                  {"made with another tokenizer", w.data("tokenizer.json")});
    check_refused(train_gpt_with({"eval", finished_run(), "--data", directory / "data/val_*.bin"}),
                  1, {"made with another tokenizer"});

    fs::copy(finished_run(), directory / "run", fs::copy_options::recursive);
    check_refused(train_gpt_with(w.train(directory / "run", all_theirs)), 1,
                  {"has different tokens", "tokenizer.path"});
    const Outcome started = check_succeeds(train_gpt_with(w.train(
        directory / "other",
        all_theirs + Arguments{"--set", "model.init_from=" + finished_run(), "--stop-at", "1"})));
    CHECK(
        contains(started.out + started.err, "has different tokens from the one of these weights"));
}

TEST_CASE("a run beyond the configuration's end, and a profile that cannot be made, are reported",
          "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    fs::copy(finished_run(), run, fs::copy_options::recursive);
    const std::string config = read(run + "/config.json"), manifest = read(run + "/manifest.json");
    const Outcome outcome = check_succeeds(
        train_gpt_with(w.train(run, {"--set", "schedule.steps=10", "--set",
                                     "optimizer.learning_rate=0.5", "--profile", "3"})));
    CHECK(contains(outcome.out, "already complete: step 12 is saved in " + run +
                                    ", beyond the configuration's 10"));
    CHECK(contains(outcome.out, "no profile, since no steps are left"));
    CHECK(read(run + "/config.json") == config);
    CHECK(read(run + "/manifest.json") == manifest);
    CHECK(metrics_of(run) == metrics_of(finished_run()));
    const Outcome more = check_succeeds(
        train_gpt_with(w.train(run, {"--set", "schedule.steps=14", "--profile", "3"})));
    CHECK(contains(more.out, "no profile, which takes 5 steps; 2 are left"));
}

TEST_CASE("a profile covers only steps, not the work between them", "[cli][cuda]") {
    const TemporaryDirectory directory;
    const auto calls_of = [&](const std::string& run, const Arguments& more) {
        Arguments options{"--profile", "4"};
        options.insert(options.end(), more.begin(), more.end());
        const std::string out =
            check_succeeds(train_gpt_with(Workplace::get().train(directory / run, options))).out;
        std::map<std::string, std::string> calls;
        const std::regex row("\n  ([a-z_]+(?: [a-z_]+)*) +([0-9.]+) +[0-9.]+ +[0-9.]+% ");
        for (std::sregex_iterator at(out.begin(), out.end(), row), end; at != end; ++at)
            calls[(*at)[1]] = (*at)[2];
        return calls;
    };
    const auto alone = calls_of(
        "alone", {"--set", "evaluation.every=0", "--set", "sampling.every=0", "--stop-at", "7"});
    CHECK(alone.at("head_loss") == "2.0");  // micro-batches of a step
    CHECK(alone == calls_of("between", {"--set", "evaluation.every=1", "--set", "sampling.every=2",
                                        "--set", "checkpoint.every=3", "--stop-at", "7"}));
}

TEST_CASE("results that cannot be written are an error", "[cli]") {
    for (const std::string& command :
         Arguments{"config", "--version", "plan " + Workplace::get().config(),
                   "eval " + finished_run(), "train configs/quickstart.json --print-config",
                   "report " + finished_run() + " " + finished_run() + " --tolerance 0",
                   "report " + finished_run() + " " + finished_run() + " --gap 0"}) {
        CAPTURE(command);
        const ProgramResult result =
            run_program({"sh", "-c", "'" + binary() + "' " + command + " > /dev/full"});
        CHECK(result.exit_code == 1);
        CHECK(contains(result.output, "could not be written"));
    }
}

TEST_CASE("a run that resumes with different data says so", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "2"})));
    const Outcome same = check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "4"})));
    CHECK_FALSE(contains(same.out, "has changed"));
    const Outcome other = check_succeeds(train_gpt_with(
        w.train(run, {"--stop-at", "6", "--set", "data.train=" + w.data("*_*.bin")})));
    CHECK(contains(other.out, "data.train has changed"));
    CHECK_FALSE(contains(other.out, "data.val has changed"));
}

TEST_CASE("a resumed run refuses a configuration with another model and reports other changes",
          "[cli]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    fs::copy(finished_run(), run, fs::copy_options::recursive);
    const auto train = [&](const Arguments& more) {
        return train_gpt_with(Workplace::get().train(run, more));
    };
    check_refused(train({"--set", "model.family=qwen3", "--set", "model.head_size=16"}), 1,
                  {"is of the family gpt2", "configuration's is qwen3", run});
    check_refused(train({"--set", "model.n_layer=3"}), 1, {"n_layer = 2", "3"});
    check_refused(train({"--set", "model.n_ctx=64"}), 1, {"n_ctx = 48", "64"});
    check_refused(train({"--set", "model.vocab_size=400"}), 1, {"vocab_size", "400"});
    const Outcome longer =
        check_succeeds(train({"--set", "schedule.steps=13", "--set", "batch.micro_batch=8"}));
    CHECK(contains(longer.out, "schedule.steps changed from 12 to 13"));
    CHECK(contains(longer.out, "batch.micro_batch changed from 4 to 8"));
    CHECK(contains(longer.out, "step 13/13"));
}

TEST_CASE(
    "a run that diverges keeps and names the last checkpoint whose loss was sane, also when it "
    "is started again",
    "[cli]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    fs::copy(finished_run(), run, fs::copy_options::recursive);
    // The update of step 13 sends weights so far away that later checkpoints are of no use.
    const Arguments train = Workplace::get().train(
        run, {"--set", "optimizer.learning_rate=200", "--set", "schedule.steps=10000", "--set",
              "schedule.decay=constant", "--set", "checkpoint.every=1", "--set",
              concat("checkpoint.keep=", random_int(1, 3)), "--set", "optimizer.grad_clip=0"});
    for (int start = 0; start < 2; ++start) {
        const Outcome outcome = train_gpt_with(train);
        check_refused(
            outcome, 1,
            {"not finite", (run / step_folder(12)).string(),
             "is the last checkpoint with a sane loss", "; the loss ", "optimizer.learning_rate"});
        CHECK_FALSE(contains(outcome.err, "nan"));
        CHECK(fs::exists(run / step_folder(12) / "manifest.json"));
    }
    CHECK(checkpoints_in(run).back() > 13);
}

TEST_CASE(
    "a learning rate that blows up stops the run with the step, the tensor and the last good "
    "weights",
    "[cli][cuda]") {
    const TemporaryDirectory directory;
    for (const char* dtype : {"fp32", "bf16"}) {
        const fs::path run = directory / dtype;
        const Arguments options{"--set", "optimizer.learning_rate=1e30", "--set",
                                std::string("precision.dtype=") + dtype};
        const Outcome outcome = train_gpt_with(Workplace::get().train(run, options));
        check_refused(outcome, 1, {"not finite", "first in ", "optimizer.learning_rate"});
        const auto steps = checkpoints_in(run);
        REQUIRE(steps.size() == 1);
        CHECK(contains(outcome.err, "step " + std::to_string(steps[0] + 1) + " "));
        CHECK(contains(outcome.err, "step " + std::to_string(steps[0]) + " of 12 is saved"));
        check_finite_weights(run / step_folder(steps[0]));
        CHECK(static_cast<int64_t>(metrics_of(run).size()) >= steps[0]);
    }
    // Weights outside the range of fp32 are not the last good weights: nothing is saved, and an
    // older checkpoint stays.
    fs::copy(finished_run(), directory / "older", fs::copy_options::recursive);
    const Outcome outcome = train_gpt_with(Workplace::get().train(
        directory / "older",
        {"--set", "optimizer.learning_rate=1e37", "--set", "optimizer.weight_decay=1e6", "--set",
         "schedule.steps=20", "--set", "schedule.decay=constant", "--set", "checkpoint.every=1",
         "--set", "checkpoint.keep=1"}));
    CAPTURE(outcome.out, outcome.err);
    CHECK(outcome.code == 1);
    CHECK(contains(outcome.err, "not saved"));
    CHECK(checkpoints_in(directory / "older") == std::vector<int64_t>{4, 8, 12});
}

TEST_CASE("metrics of a run with Muon have the rate of its matrices", "[cli]") {
    const TemporaryDirectory directory;
    const double of_matrices = static_cast<double>(random_int(1, 100)) * 1e-3;
    const std::string run = directory / "run";
    check_succeeds(train_gpt_with(Workplace::get().train(
        run,
        {"--set", "optimizer.name=muon", "--set", "optimizer.learning_rate=1e-3", "--set",
         concat("optimizer.matrix_learning_rate=", of_matrices), "--set", "sampling.every=0"})));
    int steps = 0;
    for (const SortedJson& line : metrics_of(run)) {
        if (!line.contains("loss")) continue;
        const double rate = line.at("learning_rate");
        CHECK(line.at("matrix_learning_rate") == Approx(rate * 1e3 * of_matrices));
        ++steps;
    }
    CHECK(steps == 12);
    bool has_events = false;
    for (const std::string& name : names_in(run))
        has_events =
            has_events || (name.starts_with("events.out.") &&
                           contains(read(fs::path(run) / name), "train/matrix_learning_rate"));
    CHECK(has_events);
    for (const SortedJson& line : metrics_of(finished_run()))
        CHECK_FALSE(line.contains("matrix_learning_rate"));
}
