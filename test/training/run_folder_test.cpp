#include "training/files/run_folder.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "dataloader/manifest.h"
#include "dataloader/prepare.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/sorted_json.h"
#include "test/text.h"
#include "training/config/config_text.h"
#include "training/watch/metrics.h"

using namespace train_gpt;
namespace fs = std::filesystem;

TEST_CASE("a run's folder belongs to one run at a time", "[run_folder]") {
    const TemporaryDirectory directory;
    const std::string path = directory / "runs/a";
    auto first = std::make_unique<RunFolder>(path);
    CHECK_THROWS_AS(RunFolder(path), Error);
    CHECK_NOTHROW(RunFolder(directory / "runs/b"));
    first.reset();
    CHECK_NOTHROW(RunFolder(path));
    write(directory / "file", "");
    CHECK_THROWS_AS(RunFolder(directory / "file"), Error);
    CHECK_THROWS_AS(RunFolder(directory / "file/below"), Error);
}

TEST_CASE("a run overwrites only the files of runs", "[run_folder]") {
    const TemporaryDirectory directory;
    Config config;
    config.data.train = {{"synthetic", 1, "all"}};
    const std::string run = directory / "run", other = directory / "other";
    RunFolder(run).describe(config);
    CHECK_NOTHROW(RunFolder(run));
    write(run + "/manifest.json", "{\"program\": \"");  // cut short, but it may be a run's
    CHECK_NOTHROW(RunFolder(run));
    // A run that had nothing to do, or was killed at its start, has written no manifest.
    fs::remove(run + "/manifest.json");
    MetricsLog(run, std::nullopt, {});
    CHECK_NOTHROW(RunFolder(run));

    for (const auto& [name, text, reason] :
         {std::tuple{"manifest.json", R"({"program": "train_gpt", "format_version": 1})",
                     "name the folder above"},
          {"manifest.json", R"({"name": "an app"})", "no run wrote"},
          {"manifest.json", "[1]", "no run wrote"},
          {"config.json", R"({"model_type": "gpt2"})", "has a config.json that no run wrote"},
          {"metrics.jsonl", "{\"step\": 1}\n", "has a metrics.jsonl that no run wrote"}}) {
        fs::create_directory(other);
        write(other + "/" + name, text);
        CAPTURE(name, text);
        const std::string message = error_of([&] { RunFolder{other}; });
        CHECK(contains(message, other));
        CHECK(contains(message, reason));
        CHECK(read(other + "/" + name) == text);
        CHECK(std::distance(fs::directory_iterator(other), fs::directory_iterator()) == 1);
        fs::remove_all(other);
    }
}

TEST_CASE("a run's folder says what the run was", "[run_folder]") {
    const TemporaryDirectory directory;
    std::string text;
    for (int i = 0; i < 500; ++i) text += "line of text number " + std::to_string(i) + "\n";
    write(directory / "text", text);
    PrepareOptions options;
    options.texts = {directory / "text"};
    options.train_vocab = 300;
    options.out = directory / "data";
    options.shard_tokens = 1000;
    prepare(options, nullptr);

    Config config;
    config.seed = test_rng()();
    config.data.train = {{directory / "data/train_*.bin", 1, "all"}};
    config.data.val = "synthetic";
    RunFolder folder(directory / "run");
    CHECK(folder.describe(config).empty());
    CHECK(read(directory / "run/config.json") == to_json(config));
    const SortedJson manifest = SortedJson::parse(read(directory / "run/manifest.json"));
    CHECK(manifest.at("seed").get<uint64_t>() == config.seed);
    CHECK(manifest.at("val").get<std::string>() == "synthetic");
    const DataManifest data = read_data_manifest(directory / "data");
    size_t shards = 0;
    for (const PreparedShard& shard : data.shards) {
        if (shard.split != "train") continue;
        const SortedJson& entry = manifest.at("train").at(shards++);
        CHECK(entry.at("path").get<std::string>() == directory / ("data/" + shard.name));
        CHECK(entry.at("tokens").get<int64_t>() == shard.tokens);
        CHECK(entry.at("xxh3").get<std::string>() == shard.hash);
    }
    CHECK(shards > 1);
    CHECK(manifest.at("train").size() == shards);

    // What is compared when a run resumes: the contents, wherever they are.
    fs::rename(directory / "data", directory / "moved");
    config.data.train[0].glob = directory / "moved/train_*.bin";
    CHECK(folder.describe(config).empty());
    config.data.val = directory / "moved/val_*.bin";
    CHECK(folder.describe(config) == std::vector<std::string>{"data.val"});
    config.data.train.push_back({directory / "moved/val_*.bin", 0.5, "more"});
    CHECK(folder.describe(config) == std::vector<std::string>{"data.train"});
    config.data.train[1].weight = 0.25;
    CHECK(folder.describe(config) == std::vector<std::string>{"data.train"});
    CHECK(folder.describe(config).empty());
    config.data.train.pop_back();

    fs::remove(directory / "moved/data.json");  // now the shards have no hashes
    CHECK(folder.describe(config) == std::vector<std::string>{"data.train", "data.val"});
    CHECK_FALSE(SortedJson::parse(read(directory / "run/manifest.json"))
                    .at("train")
                    .at(0)
                    .contains("xxh3"));
}

TEST_CASE("the best evaluation is the first of the lowest loss on the same data, up to a step",
          "[run_folder]") {
    const TemporaryDirectory directory;
    std::string text;
    int64_t tokens = 100;  // of the validation data, which may change when a run resumes
    std::vector<std::pair<double, int64_t>> losses;
    std::map<int64_t, int64_t> tokens_at;
    for (int64_t step = 0; step < 40; step += random_int(1, 4)) {
        const bool finite = random_int(0, 5) > 0;
        const double loss = 0.5 * static_cast<double>(random_int(2, 9));
        if (random_int(0, 7) == 0) tokens += random_int(1, 50);
        tokens_at[step] = tokens;
        text += SortedJson{{"step", step},
                           {"val_loss", finite ? SortedJson(loss) : SortedJson()},
                           {"val_tokens", tokens}}
                    .dump() +
                "\n";
        if (finite) losses.emplace_back(loss, step);
    }
    write(directory / "metrics.jsonl", text);
    for (int64_t last = 0; last < 40; ++last) {
        std::pair<double, int64_t> best{INFINITY, -1};
        for (const auto& [loss, step] : losses)
            if (step <= last && tokens_at[step] == std::prev(tokens_at.upper_bound(last))->second &&
                loss < best.first)
                best = {loss, step};
        const LoggedEvaluation found = best_evaluation(directory.path(), last);
        CHECK(found.step == best.second);
        if (best.second >= 0) CHECK(found.nats_per_token == best.first);
    }
}

TEST_CASE("metrics are one JSON object a line, whatever the numbers and texts", "[run_folder]") {
    const TemporaryDirectory directory;
    MetricsLog log(directory.path(), std::nullopt, {});
    const double nan = std::numeric_limits<double>::quiet_NaN(),
                 infinity = std::numeric_limits<double>::infinity();
    log.write(1, {{"loss", 1.0 / 3}, {"text", std::string("\"quoted\"\n\xff\\")}});
    log.write(2, {{"loss", nan}, {"norm", -infinity}, {"list", std::vector{2.0, nan, 1.0 / 3}}});
    const std::string text = read(directory / "metrics.jsonl");
    const size_t end = text.find('\n');
    const SortedJson first = SortedJson::parse(text.substr(0, end)),
                     second = SortedJson::parse(text.substr(end + 1));
    CHECK(first.at("loss").get<double>() == 1.0 / 3);
    CHECK(first.begin().key() == "loss");  // the parser sorts the keys
    CHECK(text.starts_with("{\"step\":1,"));
    CHECK(second.at("loss").is_null());
    CHECK(second.at("norm").is_null());
    CHECK(contains(text, "\"list\":[2,null,0.33"));

    // What is read back, by name; null is NaN.
    std::vector<MetricsRecord> records;
    read_metrics(directory.path(), [&](const MetricsRecord& record) { records.push_back(record); });
    REQUIRE(records.size() == 2);
    std::map<std::string, MetricsRecord::Value> fields[2];
    for (size_t i = 0; i < 2; ++i) {
        CHECK(records[i].step == static_cast<int64_t>(i) + 1);
        CHECK(records[i].kind == MetricsRecord::Kind::training_step);
        for (const auto& [name, value] : records[i].fields) fields[i][name] = value;
    }
    CHECK(std::get<double>(fields[0].at("loss")) == 1.0 / 3);
    CHECK(std::get<std::string>(fields[0].at("text")) == first.at("text").get<std::string>());
    CHECK(std::isnan(std::get<double>(fields[1].at("loss"))));
    CHECK(std::isnan(std::get<double>(fields[1].at("norm"))));
    const auto list = std::get<std::vector<double>>(fields[1].at("list"));
    REQUIRE(list.size() == 3);
    CHECK(list[0] == 2);
    CHECK(std::isnan(list[1]));
    CHECK(list[2] == 1.0 / 3);
}

TEST_CASE("a resumed run keeps the metrics up to its step and drops what comes again",
          "[run_folder]") {
    const TemporaryDirectory directory;
    const std::string kept =
        "{\"step\":1,\"loss\":5.0}\n{\"step\":2,\"loss\":4.0}\n{\"step\":2,\"val_loss\":4.5,\"val_"
        "bits_per_byte\":1.5}\n{"
        "\"step\":3,\"loss\":3.0}\n";
    const std::string dropped = "{\"step\":4,\"loss\":2.0}\n{\"step\":4,\"val_loss\":2.5}\n";
    const std::string broken =
        "not json\n{\"loss\": 1}\n{\"step\": \"3\"}\n[3]\n\n{\"step\":3,\"lo";
    write(directory / "metrics.jsonl", kept + dropped + broken);
    const LoggedEvaluation evaluation = last_evaluation(directory.path(), 3);
    CHECK(evaluation.step == 2);
    CHECK(evaluation.nats_per_token == 4.5);
    CHECK(evaluation.bits_per_byte == 1.5);
    CHECK(last_evaluation(directory.path(), 4).step == 4);
    CHECK(last_evaluation(directory.path(), 1).step == -1);
    CHECK(last_evaluation(directory / "none", 1).step == -1);
    {
        MetricsLog log(directory.path(), 3, {});
        CHECK(read(directory / "metrics.jsonl") == kept);
        log.write(4, {});
        CHECK(read(directory / "metrics.jsonl").starts_with(kept + "{\"step\":4,"));
    }
    MetricsLog(directory.path(), 1, {});
    CHECK(read(directory / "metrics.jsonl") == "{\"step\":1,\"loss\":5.0}\n");
    MetricsLog(directory.path(), std::nullopt, {});
    CHECK(read(directory / "metrics.jsonl").empty());

    // Of runs without a checkpoint to resume from, the longest metrics are kept.
    CHECK(read(directory / "metrics.old.jsonl") == "{\"step\":1,\"loss\":5.0}\n");
    for (const std::string& text : {kept, dropped, kept + dropped}) {
        write(directory / "metrics.jsonl", text);
        MetricsLog(directory.path(), std::nullopt, {});
        CHECK(read(directory / "metrics.old.jsonl") == (text == dropped ? kept : text));
    }

    fs::remove(directory / "metrics.jsonl");
    fs::create_directory(directory / "metrics.jsonl");
    CHECK_THROWS_AS(MetricsLog(directory.path(), std::nullopt, {}), Error);
}

TEST_CASE("each line of metrics says tokens and seconds, which grow over the starts of a run",
          "[run_folder]") {
    const TemporaryDirectory directory;
    const int64_t tokens_per_step = random_int(1, 1 << 20);
    const auto before = static_cast<double>(random_int(100, 200));
    write(directory / "metrics.jsonl", SortedJson{{"step", 1}, {"seconds", 1}}.dump() + "\n" +
                                           SortedJson{{"step", 2}, {"seconds", before}}.dump() +
                                           "\n" + SortedJson{{"step", 2}, {"val_loss", 4}}.dump() +
                                           "\n" +  // of a version that did not record seconds
                                           SortedJson{{"step", 3}, {"seconds", 1000}}.dump() +
                                           "\n");
    MetricsLog log(directory.path(), 2, {.tokens = TokenCount(tokens_per_step)});
    log.write(3, {{"loss", 1.0}});
    log.write(4, {});
    const std::string text = read(directory / "metrics.jsonl");
    double last = before;
    std::istringstream lines(text.substr(text.find("{\"step\":3")));
    int64_t step = 3;
    for (std::string line; std::getline(lines, line); ++step) {
        const SortedJson json = SortedJson::parse(line);
        CHECK(json.at("step").get<int64_t>() == step);
        CHECK(json.at("tokens").get<int64_t>() == step * tokens_per_step);
        CHECK(json.at("seconds").get<double>() > last);
        last = json.at("seconds");
    }
    CHECK(step == 5);
    CHECK(last < before + 100);  // only the seconds since this start are added
}
