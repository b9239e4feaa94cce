// The command line: help, invalid arguments, configurations.
#include <map>
#include <regex>

#include "test/commands/program.h"

using namespace train_gpt;

TEST_CASE("every command explains itself, and the version names build, libraries and devices",
          "[cli][cuda]") {
    const std::map<std::string, std::string> options{{"tokenize", "--train-vocab"},
                                                     {"train", "--stop-at"},
                                                     {"plan", "--world"},
                                                     {"sample", "--top-p"},
                                                     {"eval", "--hellaswag"},
                                                     {"config", "--schema"},
                                                     {"selfcheck", "--tolerance"},
                                                     {"verify", "CHECKPOINT"},
                                                     {"import", "--tokenizer"},
                                                     {"export", "--max-shard-size"},
                                                     {"report", "--tolerance"},
                                                     {"report", "--gap"},
                                                     {"replay", "--to"},
                                                     {"look", "--prompt-file"}};
    for (const auto& [command, option] : options) {
        const Outcome help = check_succeeds(train_gpt_with({command, "--help"}));
        CHECK(contains(help.out, option));
        CHECK(help.err.empty());
        CHECK(contains(check_succeeds(train_gpt_with({"--help"})).out, command));
    }
    CHECK(contains(check_succeeds(train_gpt_with({})).out, "Usage"));
    const std::string version = check_succeeds(train_gpt_with({"--version"})).out;
    // The number is in one place, the file VERSION, and CHANGELOG.md has its section.
    const std::string number = read("VERSION").substr(0, read("VERSION").find('\n'));
    CHECK(std::regex_match(number, std::regex(R"(\d+\.\d+\.\d+)")));
    CHECK(std::regex_search(version, std::regex("^train_gpt " + number + R"(( \([^)]+\))?\n)")));
    CHECK(std::regex_search(read("CHANGELOG.md"),
                            std::regex("\n## " + number + R"( \([0-9]{4}-[0-9]{2}-[0-9]{2}\)\n)")));
    for (const char* name : {"CPU", "oneDNN", "CUDA", "MPI", "zlib", "libzstd", "snappy", "liblz4"})
        CHECK(contains(version, concat("\n", name, " ")));
    CHECK(contains(check_succeeds(train_gpt_with({"train", "--help"})).out, "train_gpt train "));
}

TEST_CASE("a start without a GPU loads none of the libraries that multiply matrices on one",
          "[cli]") {
    const auto loaded = [](const Arguments& command) {
        const Outcome outcome = train_gpt_with(command, {.environment = {"LD_DEBUG=files"}});
        CHECK(contains(outcome.err, "libstdc++.so"));
        return contains(outcome.err, "libcublasLt.so");
    };
    CHECK_FALSE(loaded({"config"}));
    CHECK_FALSE(loaded({"plan", "configs/gpt2-124m.json", "--set", "device=cpu", "--set",
                        "model.vocab_size=50257"}));
}

TEST_CASE("a command line that cannot be understood ends with exit code 2 and one line", "[cli]") {
    for (const Arguments& more : {Arguments{}, {Workplace::get().config()}, {"--set", "seed=1"}}) {
        Arguments mistyped{"trian"};
        mistyped.insert(mistyped.end(), more.begin(), more.end());
        check_refused(train_gpt_with(mistyped), 2,
                      {"there is no command \"trian\"", "tokenize, train, "});
    }
    check_refused(train_gpt_with({"--verbose"}), 2, {"--verbose"});
    check_refused(train_gpt_with({"train"}), 2, {"config", "train_gpt train --help"});
    check_refused(train_gpt_with({"train", "a.json", "--stop"}), 2, {"--stop"});
    check_refused(train_gpt_with({"train", "a.json", "b.json"}), 2, {"b.json"});
    check_refused(train_gpt_with({"train", "a.json", "--stop-at", "0"}), 2, {"--stop-at", "0"});
    check_refused(train_gpt_with({"train", "a.json", "--stop-at", "soon"}), 2,
                  {"--stop-at", "soon"});
    check_refused(train_gpt_with({"train", Workplace::get().config(), "--set", "seed"}), 2,
                  {"seed", "key=value"});
    check_refused(train_gpt_with({"plan", "a.json", "--world", "-1"}), 2, {"--world"});
    check_refused(train_gpt_with({"sample"}), 2, {"checkpoint"});
    check_refused(train_gpt_with({"sample", "x", "--device", "tpu"}), 2, {"--device", "tpu"});
    for (const char* number : {"nan", "inf", "warm", "-1", "1e9", ""})
        check_refused(train_gpt_with({"sample", "x", "--temperature", number}), 2,
                      {"--temperature"});
    for (const char* number : {"nan", "0", "1.1", "all"})
        check_refused(train_gpt_with({"sample", "x", "--top-p", number}), 2, {"--top-p"});
    for (const char* number : {"-1", "1.5", "x", "18446744073709551616000"})
        check_refused(train_gpt_with({"sample", "x", "--seed", number}), 2, {"--seed"});
    check_refused(train_gpt_with({"tokenize", "a.txt"}), 2, {"--out"});
    check_refused(train_gpt_with({"tokenize", "a.txt", "--out", "x"}), 2,
                  {"--train-vocab", "--tokenizer"});
    check_refused(train_gpt_with({"tokenize", "a.txt", "--out", "x", "--train-vocab", "-300"}), 2,
                  {"--train-vocab"});
    check_refused(train_gpt_with({"tokenize", "a.txt", "--out", "x", "--train-vocab", "300",
                                  "--val-split", "middle"}),
                  2, {"--val-split", "middle"});
    check_refused(train_gpt_with({"tokenize", "-", "--out", "x", "--train-vocab", "300"}), 2,
                  {"--train-vocab", "standard input"});
    check_refused(train_gpt_with({"tokenize", "a.txt", "--out", "x", "--train-vocab", "300",
                                  "--threads", "-1"}),
                  2, {"--threads"});
    for (const auto& [option, value] : {std::pair{"--train-vocab", "256"},
                                        {"--train-vocab", "4194305"},
                                        {"--val-fraction", "0.7"},
                                        {"--val-fraction", "nan"},
                                        {"--shard-tokens", "1"}}) {
        Arguments tokenize{"tokenize", "a.txt", "--out", "x", option, value};
        if (std::string(option) != "--train-vocab")
            tokenize.insert(tokenize.end(), {"--train-vocab", "300"});
        check_refused(train_gpt_with(tokenize), 2, {option, value});
    }
    for (const char* command : {"import", "export"})
        check_refused(train_gpt_with({command, "test/fixtures/gpt2-tiny", "--out", ""}), 2,
                      {"--out"});
    check_refused(train_gpt_with({"eval", "test/fixtures/gpt2-tiny"}), 2, {"--data"});
    check_refused(train_gpt_with({"selfcheck", "--device", "tpu"}), 2, {"--device", "tpu"});
    for (const char* percent : {"nan", "-1", "some"})
        check_refused(train_gpt_with({"selfcheck", "--tolerance", percent}), 2, {"--tolerance"});
    check_refused(train_gpt_with({"selfcheck", "--max-bytes", "65535"}), 2,
                  {"--max-bytes", "65536"});
}

TEST_CASE("configurations are refused with the key, the value and the nearest valid key", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const auto refused = [&](const Arguments& overrides, const Arguments& parts) {
        Arguments arguments = w.train(directory / "run");
        for (const std::string& text : overrides) arguments = arguments + Arguments{"--set", text};
        check_refused(train_gpt_with(arguments), 1, parts);
        CHECK_FALSE(fs::exists(directory / "run"));
    };
    refused({"model.n_layers=2"}, {"model.n_layers", "\"model.n_layer\""});
    refused({"model.n_layer=two"}, {"model.n_layer = two", "whole number"});
    refused({"optimizer.learning_rate=NaN"}, {"optimizer.learning_rate", "NaN"});
    refused({"optimizer.learning_rate=-1"}, {"optimizer.learning_rate", "greater than 0"});
    refused({"model.n_embd=33"}, {"model.n_embd = 33", "model.n_head = 2"});
    refused({"batch.micro_batch=-1"}, {"batch.micro_batch = -1"});
    refused({"batch.tokens_per_step=255"}, {"batch.tokens_per_step = 255"});
    refused({"run_dir="}, {"run_dir"});
    refused({"data.train="}, {"data.train"});
    refused({"model.vocab_size=280"}, {"model.vocab_size", "280"});
    refused({"tokenizer.path="}, {"tokenizer.path"});
    refused({"evaluation.hellaswag=x.jsonl", "data.val="}, {"evaluation.hellaswag", "data.val"});
    refused({"schedule.epochs=2"}, {"schedule.steps", "schedule.epochs"});
    if (!contains(check_succeeds(train_gpt_with({"--version"})).out, "GPU 0"))
        refused({"device=cuda"}, {"device \"cuda\" cannot be used"});
}

TEST_CASE("the printed configuration reads back equal", "[cli]") {
    const TemporaryDirectory directory;
    const Arguments overrides{
        "--set", "seed=18446744073709551615",      "--set",         "optimizer.learning_rate=0.1",
        "--set", "sampling.prompt=\"quoted\" = é", "--print-config"};
    const std::string printed =
        check_succeeds(train_gpt_with(Workplace::get().train(directory / "run", overrides))).out;
    write(directory / "printed.json", printed);
    CHECK(check_succeeds(train_gpt_with({"train", directory / "printed.json", "--print-config"}))
              .out == printed);
    CHECK(SortedJson::parse(printed)["seed"].get<uint64_t>() == 18446744073709551615u);
    CHECK_FALSE(fs::exists(directory / "run"));
}
