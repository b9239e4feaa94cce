// What a newcomer types: presets by name, --data, keys as options, folders as data.

#include <algorithm>
#include <string>

#include "test/commands/program.h"
#include "test/parallel/ranks.h"

using namespace train_gpt;

namespace {

/// The configuration that a command line stands for.
SortedJson printed_config(const Arguments& arguments) {
    const Arguments train{"train"}, print{"--print-config"};
    return SortedJson::parse(check_succeeds(train_gpt_with(train + arguments + print)).out);
}

/// Starts the program with arguments in another folder.
Outcome train_gpt_in(const fs::path& folder, const std::string& program,
                     const std::string& arguments) {
    const ProgramResult result = run_program(
        {"bash", "-c", concat("cd '", folder.string(), "' && '", program, "' ", arguments)}, {});
    return {result.exit_code, result.output, result.output};
}

}  // namespace

TEST_CASE("a preset's name is a configuration, and near names are suggested", "[cli]") {
    const SortedJson by_path = printed_config({"configs/gpt2-30m.json"});
    CHECK(printed_config({"gpt2-30m"}) == by_path);
    CHECK(printed_config({"gpt2-30m.json"}) == by_path);
    check_succeeds(train_gpt_with(
        {"plan", "gpt2-30m", "--set", "device=cpu", "--set", "model.vocab_size=512"}));
    check_refused(train_gpt_with({"plan", "gpt2-31m"}), 1, {"gpt2-31m", "nearest", "gpt2-30m"});
    check_refused(train_gpt_with({"train", "GPT2_124M"}), 1, {"GPT2_124M", "gpt2-124m"});
    check_refused(train_gpt_with({"plan", "tinyshakspeare"}), 1, {"tinyshakespeare"});
    check_refused(train_gpt_with({"plan", "llama3"}), 1, {"llama3-8b", "llama3-70b"});
    check_refused(train_gpt_with({"plan", "configs/llama3-9b.json"}), 1,
                  {"configs/llama3-9b.json", "llama3-8b"});
    check_refused(train_gpt_with({"plan", "schema"}), 1, {"schema", "gpt2-124m", "tinystories"});
}

TEST_CASE(
    "presets are found beside the program, in its repository and where they are installed, and "
    "a file of the same name comes first",
    "[cli]") {
    const TemporaryDirectory directory;
    const auto plan = [&](const std::string& program, const std::string& name) {
        return train_gpt_in(directory / "elsewhere", program,
                            concat("train ", name, " --print-config"));
    };
    fs::create_directories(directory / "elsewhere/mine");  // a folder is no configuration
    for (const auto& [program, configs] : {std::pair{"bundle/train_gpt", "bundle/configs"},
                                           {"repository/build/train_gpt", "repository/configs"},
                                           {"usr/bin/train_gpt", "usr/share/train_gpt/configs"}}) {
        const std::string copy = directory / program, preset = directory / configs;
        fs::create_directories(fs::path(copy).parent_path());
        fs::create_directories(preset);
        fs::copy_file(binary(), copy);
        CHECK(contains(plan(copy, "mine").err, "mine"));
        CHECK(plan(copy, "mine").code == 1);
        write(preset + "/mine.json", R"({"seed": 5, "schedule": {"steps": 1}})");
        const Outcome found = plan(copy, "mine");
        CAPTURE(found.err);
        CHECK(contains(found.out, "\"seed\": 5,"));
        write(directory / "elsewhere/mine.json", R"({"seed": 6, "schedule": {"steps": 1}})");
        CHECK(contains(plan(copy, "mine").out, "\"seed\": 5,"));
        CHECK(contains(plan(copy, "mine.json").out, "\"seed\": 6,"));
        fs::remove(directory / "elsewhere/mine.json");
        fs::remove_all(fs::path(copy).parent_path());
    }
}

TEST_CASE("--data stands for the shards and the tokenizer of a folder, and --set overrides it",
          "[cli]") {
    const Workplace& place = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path data = directory / "my [data]*";  // a name with a pattern's characters
    fs::copy(fs::path(place.data("data.json")).parent_path(), data);
    for (const std::string& given : {data.string(), data.string() + "/"}) {
        const SortedJson config = printed_config({"tinyshakespeare", "--data", given});
        CHECK(config["tokenizer"]["path"] == (data / "tokenizer.json").string());
    }
    CHECK(printed_config({"tinyshakespeare", "--data", data, "--set",
                          "data.val=other"})["data"]["val"] == "other");
    check_succeeds(train_gpt_with({"plan", "tinyshakespeare", "--data", data}));

    Arguments train = place.train(directory / "run", {"--data", data, "--set", "tokenizer.path=x"});
    check_refused(train_gpt_with(train), 1, {"x"});
    train = place.train(directory / "run", {"--data", data});
    const Outcome trained = check_succeeds(train_gpt_with(train));
    CHECK_FALSE(contains(trained.out, "no validation shards"));
    const double loss = metrics_of(directory / "run").back()["val_loss"];
    CHECK(loss == metrics_of(finished_run()).back()["val_loss"].get<double>());
    const std::string evaluated =
        check_succeeds(train_gpt_with({"eval", directory / "run", "--data", data})).out;
    CHECK(number_after(evaluated, "validation loss ") == Approx(loss).epsilon(1e-5));

    for (const auto& file : fs::directory_iterator(data))
        if (file.path().filename().string().starts_with("val_")) fs::remove(file);
    const Outcome unvalidated =
        check_succeeds(train_gpt_with(place.train(directory / "without", {"--data", data})));
    CHECK(contains(unvalidated.out, "has no validation shards (val_*.bin)"));
    check_refused(train_gpt_with({"eval", directory / "run", "--data", data}), 1,
                  {"no validation shards", "train_*.bin"});
}

TEST_CASE("a folder as data.train is named even where the tokenizer is to be fetched", "[cli]") {
    const Workplace& place = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path folder = fs::path(place.data("data.json")).parent_path();
    check_refused(
        train_gpt_with(place.train(directory / "run", {"--set", "data.train=" + folder.string(),
                                                       "--set", "tokenizer.path=data/gpt2"})),
        1, {"data.train", "train_*.bin"});
}

TEST_CASE("--data says what a folder lacks", "[cli]") {
    const Workplace& place = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path data = directory / "data";
    const auto refused = [&](const std::string& given, const Arguments& parts) {
        for (const char* command : {"train", "plan"})
            check_refused(train_gpt_with({command, place.config(), "--data", given}), 1, parts);
    };
    refused(data, {"--data " + data.string(), "no such folder", "tokenize"});
    fs::create_directories(data);
    refused(data, {"--data " + data.string(), "no training shards", "tokenize"});
    write(data / "val_000000.bin", "");
    refused(data, {"only validation shards"});
    write(data / "train_000000.bin", "");
    refused(data, {"no tokenizer.json", "data.train=" + (data / "train_*.bin").string()});
    refused(data / "train_000000.bin", {"is a file", "folder"});
    refused("data/tinystories", {"scripts/data.sh tinystories"});
}

TEST_CASE("a folder in place of shards is answered with its shards", "[cli]") {
    const Workplace& place = Workplace::get();
    const TemporaryDirectory directory;
    const std::string data = fs::path(place.data("data.json")).parent_path().string();
    for (const char* slash : {"", "/"}) {
        check_refused(train_gpt_with(place.train(directory / "run",
                                                 {"--set", concat("data.train=", data, slash)})),
                      1, {"data.train", "is a folder", data + "/train_*.bin"});
        check_refused(train_gpt_with(place.train(directory / "run",
                                                 {"--set", concat("data.val=", data, slash)})),
                      1, {"data.val", "is a folder", data + "/val_*.bin"});
    }
    const std::string list =
        concat(R"(data.train=[{"glob": ")", data, R"(/train_*.bin"}, {"glob": ")", data, "\"}]");
    check_refused(train_gpt_with(place.train(directory / "run", {"--set", list})), 1,
                  {"is a folder", data + "/train_*.bin"});
    fs::create_directory(directory / "none");
    const Arguments empty{"--set", concat("data.train=", directory / "none")};
    check_refused(train_gpt_with(place.train(directory / "run", empty)), 1,
                  {"is a folder", "no shards", "tokenize"});
    fs::copy_file(place.data("train_000000.bin"), directory / "none/fineweb_train_000001.bin");
    check_refused(train_gpt_with(place.train(directory / "run", empty)), 1, {"none/*_train_*.bin"});
    fs::rename(directory / "none/fineweb_train_000001.bin", directory / "none/tokens.bin");
    check_refused(train_gpt_with(place.train(directory / "run", empty)), 1, {"none/*.bin"});
    CHECK_FALSE(fs::exists(directory / "run"));
}

TEST_CASE("a key that is typed as an option is answered with --set", "[cli]") {
    const std::string config = Workplace::get().config();
    const auto answered = [&](const Arguments& typed, const std::string& right) {
        for (const char* command : {"train", "plan"}) {
            const Arguments before = Arguments{command} + typed + Arguments{config};
            const Arguments after = Arguments{command, config} + typed;
            for (const Arguments& arguments : {before, after})
                check_refused(train_gpt_with(arguments), 2, {typed.front(), "--set " + right});
        }
    };
    answered({"--model.n_layer=4"}, "model.n_layer=4");
    answered({"--model.n-layer=4"}, "model.n_layer=4");
    answered({"model.n_layer=4"}, "model.n_layer=4");
    answered({"--model.n_layr=4"}, "model.n_layer=4");
    answered({"--n_layer=4"}, "model.n_layer=4");
    answered({"--lr=3e-4"}, "optimizer.learning_rate=3e-4");
    answered({"--learning-rate=3e-4"}, "optimizer.learning_rate=3e-4");
    answered({"--seed=4"}, "seed=4");
    answered({"--device=cpu"}, "device=cpu");
    answered({"--data.train=a b*.bin"}, "'data.train=a b*.bin'");
    check_refused(train_gpt_with({"train", config, "--model.n_layer", "4"}), 2,
                  {"--set model.n_layer=4"});
    check_refused(train_gpt_with({"train", config, "--data.document_mask"}), 2,
                  {"--set data.document_mask=VALUE"});
    check_refused(train_gpt_with({"plan", config, "--set", "seed=1", "model.n_layer=4"}), 2,
                  {"model.n_layer=4 is not an option"});
    for (const char* other : {"--stop", "--verbose", "--every=3", "unknown.key=3"}) {
        const Outcome outcome = train_gpt_with({"train", config, other});
        check_refused(outcome, 2, {other});
        CHECK_FALSE(contains(outcome.err, "--set"));
    }
}

TEST_CASE("no help speaks of GPT-2 alone where five families work", "[cli]") {
    for (const char* command : {"", "tokenize", "train", "plan", "sample", "look", "eval", "import",
                                "export", "selfcheck", "verify", "report", "replay", "config"}) {
        Arguments help{command, "--help"};
        if (help.front().empty()) help.erase(help.begin());
        std::string text = check_succeeds(train_gpt_with(help)).out;
        std::replace(text.begin(), text.end(), '\n', ' ');
        CAPTURE(text);
        CHECK_FALSE(contains(text, "GPT-2 model"));
        CHECK_FALSE(contains(text, "GPT language"));
        CHECK(contains(text, "GPT-2") == contains(text, "Llama"));
    }
}

TEST_CASE("a printed configuration has what a run would use, and the run's folder what it used",
          "[cli]") {
    const Workplace& place = Workplace::get();
    const TemporaryDirectory directory;
    const Arguments open{"--set", "model.family=llama",      "--set", "model.n_ctx=64",
                         "--set", "batch.micro_batch=0",     "--set", "precision.dtype=auto",
                         "--set", "batch.sequence_length=0", "--set", "device=auto"};
    const Arguments arguments = place.train(directory / "run", open);
    const Arguments print{"--print-config"};
    const SortedJson printed =
        SortedJson::parse(check_succeeds(train_gpt_with(arguments + print)).out);
    const Outcome trained = check_succeeds(train_gpt_with(arguments));
    const SortedJson kept = SortedJson::parse(read(directory / "run/config.json"));
    const SortedJson choices = SortedJson::parse(read(directory / "run/choices.json"));
    CHECK(contains(trained.out, " in " + kept["precision"]["dtype"].get<std::string>() + " on "));
    for (const SortedJson& json : {printed, kept}) {
        const SortedJson& model = json["model"];
        CHECK(model["vocab_size"] ==
              SortedJson::parse(
                  read(directory / ("run/" + step_folder(12) + "/config.json")))["vocab_size"]);
        CHECK(model["n_kv_head"] == 2);
        CHECK(model["head_size"] == 16);
        CHECK(model["n_ff"] == 256);
        CHECK(model["norm"] == "rmsnorm");
        CHECK(model["norm_epsilon"] == 1e-5);
        CHECK(model["mlp"] == "swiglu");
        CHECK(model["bias"] == "none");
        CHECK(model["qk_norm"] == "off");
        CHECK(model["tied_head"] == "off");
        CHECK(model["positions"] == "rope");
        CHECK(model["rope_theta"] == 10000);
        CHECK(model["init_std"] == 0.02);
        CHECK(json["batch"]["sequence_length"] == 64);
        CHECK(json["precision"]["dtype"] == printed["precision"]["dtype"]);
    }
    CHECK(printed["precision"]["dtype"] != "auto");
    CHECK(printed["batch"]["micro_batch"] == choices["micro_batch"]);
    CHECK(printed["memory"]["recompute"] == choices["recompute"]);
    CHECK(printed["device"] != "auto");
    CHECK(kept["batch"]["micro_batch"] == 0);  // so that it starts the run on any machine
    const std::string report = read(directory / "run/report.html");
    CHECK(contains(report, concat(choices["micro_batch"].get<int>(), " (chosen)")));
    CHECK(contains(report, "rmsnorm"));

    // The printed configuration, and the kept one, make the same run.
    write(directory / "printed.json", printed.dump());
    for (const std::string& file : {directory / "printed.json", directory / "run/config.json"}) {
        fs::remove_all(directory / "again");
        check_succeeds(
            train_gpt_with({"train", file, "--set", concat("run_dir=", directory / "again")}));
        check_same_state(directory / "run", directory / "again", 12);
    }
    // What cannot be resolved yet stays open, and a note says why.
    const Outcome early =
        check_succeeds(train_gpt_with({"train", "configs/tinystories.json", "--print-config",
                                       "--set", "tokenizer.path=" + (directory / "none.json")}));
    CHECK(contains(early.err, "note: not all of the configuration is resolved"));
    CHECK(SortedJson::parse(early.out)["model"]["vocab_size"] == 0);
    CHECK(SortedJson::parse(early.out)["model"]["n_ff"] == 1024);
}
