// train_gpt sample and eval.

#include <cmath>

#include "test/commands/program.h"

using namespace train_gpt;

TEST_CASE("samples follow prompt, temperature, top-k, top-p and seed", "[cli][cuda]") {
    const auto sample = [&](const Arguments& more) {
        return check_succeeds(
                   train_gpt_with(Arguments{"sample", finished_run(), "--max-tokens", "40"} + more))
            .out;
    };
    const Arguments prompt{"--prompt", "hello there"};
    const std::string greedy = sample(prompt + Arguments{"--temperature", "0"});
    CHECK(greedy.starts_with("hello there"));
    CHECK(greedy.size() > std::string("hello there\n").size());
    CHECK(sample(prompt + Arguments{"--temperature", "0", "--seed", "7"}) == greedy);
    CHECK(sample(prompt + Arguments{"--top-k", "1", "--seed", "8"}) == greedy);
    CHECK(sample(prompt + Arguments{"--top-p", "1e-9", "--seed", "9"}) == greedy);

    const std::string warm = sample(prompt + Arguments{"--temperature", "1.5", "--seed", "3"});
    CHECK(sample(prompt + Arguments{"--temperature", "1.5", "--seed", "3"}) == warm);
    CHECK(sample(prompt + Arguments{"--temperature", "1.5", "--seed", "4"}) != warm);
    const std::string two =
        sample(prompt + Arguments{"--temperature", "1.5", "--seed", "3", "--samples", "2"});
    CHECK(two.starts_with(warm.substr(0, warm.size() - 1) + "\n---\nhello there"));

    CHECK(sample({}).size() > 1);
    CHECK(sample({"--prompt", ""}) == sample({}));
    std::string long_prompt;
    for (int i = 0; i < 500; ++i) long_prompt += "word ";  // many times n_ctx
    CHECK(sample({"--prompt", long_prompt}).starts_with(long_prompt));
    const std::string bytes = "\xff\xfe \xc3( \xe2\x82";
    CHECK(sample({"--prompt", bytes}).starts_with(bytes));
    CHECK(sample(prompt + Arguments{"--dtype", "bf16", "--temperature", "0"})
              .starts_with("hello there"));
}

TEST_CASE("a model with more rows than its tokenizer has tokens writes text", "[cli]") {
    const TemporaryDirectory directory;
    const Outcome outcome = check_succeeds(train_gpt_with(Workplace::get().train(
        directory / "run", {"--set", "model.vocab_size=3000", "--set", "schedule.steps=3", "--set",
                            "sampling.samples=3", "--set", "sampling.temperature=3"})));
    CHECK(contains(outcome.out, "--- sample\na"));
    check_succeeds(train_gpt_with({"sample", directory / "run", "--temperature", "3"}));
}

TEST_CASE("eval gives the last validation loss of the run, also from a plain Hugging Face folder",
          "[cli][cuda]") {
    const auto metrics = metrics_of(finished_run());
    const double expected = metrics.back()["val_loss"], bits = metrics.back()["val_bits_per_byte"];
    const std::string out = check_succeeds(train_gpt_with({"eval", finished_run()})).out;
    CHECK(number_after(out, "validation loss ") == Approx(expected).epsilon(1e-5));
    CHECK(number_after(out, "nats/token, ") == Approx(bits).epsilon(1e-5));
    CHECK(number_after(out, "perplexity ") == Approx(std::exp(expected)).epsilon(1e-4));
    CHECK(number_after(out, " over ") == metrics.back()["val_tokens"].get<double>());

    const TemporaryDirectory directory;
    const fs::path plain = directory / "plain";
    fs::copy(fs::path(finished_run()) / step_folder(12), plain, fs::copy_options::recursive);
    for (const char* name : {"manifest.json", "train_gpt.json", optimizer_file})
        fs::remove(plain / name);
    const std::string windows = check_succeeds(train_gpt_with({"eval", plain, "--data",
                                                               Workplace::get().data("val_*.bin")}))
                                    .out;
    CHECK(number_after(windows, "validation loss ") ==
          Approx(expected).epsilon(0.05));  // windows of n_ctx, not of 32
    CHECK(number_after(windows, " over ") == metrics.back()["val_tokens"].get<double>());
    CHECK(contains(check_succeeds(train_gpt_with({"eval", "test/fixtures/gpt2-tiny", "--data",
                                                  "synthetic", "--max-tokens", "100"}))
                       .out,
                   " over 100 tokens"));
    check_refused(train_gpt_with({"sample", "test/fixtures/gpt2-tiny"}), 1, {"tokenizer"});
}

TEST_CASE("eval and sample compute in the dtype of the files, and print it", "[cli]") {
    const TemporaryDirectory directory;
    const std::string val = Workplace::get().data("val_*.bin");
    const auto evaluated = [&](const std::string& path, const Arguments& more = {}) {
        return check_succeeds(train_gpt_with(Arguments{"eval", path, "--data", val} + more)).out;
    };
    struct Case {
        const char *stored, *computed, *said;
    };
    for (const auto& [stored, computed, said] :
         {Case{"fp32", "fp32", "in fp32"},
          {"bf16", "bf16", "in bf16"},
          {"fp16", "fp32", "in fp32 from weights in fp16"}}) {
        CAPTURE(stored);
        const std::string path = directory / stored;
        check_succeeds(
            train_gpt_with({"export", finished_run(), "--out", path, "--dtype", stored}));
        const std::string out = evaluated(path);
        CHECK(out == evaluated(path, {"--dtype", computed}));
        CHECK(out.ends_with(concat(", ", said, "\n")));
        const std::string other = computed == std::string("fp32") ? "bf16" : "fp32";
        CHECK(contains(evaluated(path, {"--dtype", other}), ", in " + other));
        CHECK(contains(check_succeeds(train_gpt_with({"sample", path, "--max-tokens", "1"})).err,
                       concat("computed ", said, "\n")));
    }
    // The dtype of a run is that of its checkpoints, whatever the machine prefers.
    check_succeeds(train_gpt_with(Workplace::get().train(
        directory / "run", {"--set", "precision.dtype=bf16", "--stop-at", "1"})));
    CHECK(evaluated(directory / "run").ends_with(", in bf16\n"));
}

TEST_CASE("HellaSwag accuracy is reported by eval and by a run that names the file",
          "[cli][cuda]") {
    const TemporaryDirectory directory;
    std::string jsonl;
    for (int i = 0; i < 5; ++i)
        jsonl += SortedJson{{"ctx", "a man"},
                            {"endings", {"one", "two words", "three", "four"}},
                            {"label", i % 4}}
                     .dump() +
                 "\n";
    write(directory / "h.jsonl", jsonl);
    const std::string out =
        check_succeeds(train_gpt_with({"eval", finished_run(), "--hellaswag", directory / "h.jsonl",
                                       "--max-examples", "4"}))
            .out;
    CHECK(number_after(out, "HellaSwag accuracy ") ==
          0.25);  // the same four endings, each of which is right once
    CHECK(contains(out, "over 4 examples"));
    check_succeeds(train_gpt_with(Workplace::get().train(
        directory / "run", {"--set", "evaluation.hellaswag=" + (directory / "h.jsonl"), "--set",
                            "schedule.steps=3"})));
    CHECK(metrics_of(directory / "run").back().contains("hellaswag_normalised"));

    write(directory / "bad.jsonl", jsonl + "{\"ctx\": \"a\"}\n");
    const Outcome bad =
        train_gpt_with({"eval", finished_run(), "--hellaswag", directory / "bad.jsonl"});
    check_refused(bad, 1, {"bad.jsonl", "line 6"});
    CHECK(bad.out.empty());
    // A run notices this before it trains.
    const Outcome refused = train_gpt_with(Workplace::get().train(
        directory / "other", {"--set", "evaluation.hellaswag=" + (directory / "bad.jsonl")}));
    check_refused(refused, 1, {"line 6"});
    CHECK_FALSE(contains(refused.out, "step 1/"));
}
