// train_gpt config: the reference of all keys, of a section and of one; and where presets' data
// come from.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <regex>
#include <sstream>
#include <vector>

#include "test/commands/program.h"
#include "training/config/config.h"
#include "training/config/config_help.h"
#include "training/config/known_data.h"

using namespace train_gpt;

TEST_CASE("config prints every key, those of a section, or one", "[cli]") {
    const auto config = [](const Arguments& more) {
        return check_succeeds(train_gpt_with(Arguments{"config"} + more)).out;
    };
    const std::string all = config({});
    for (const KeyDescription& key : describe_keys()) {
        CAPTURE(key.path);
        CHECK(contains("\n" + all, "\n" + key.path + " "));
    }
    CHECK_FALSE(contains(all, "|"));
    CHECK_FALSE(contains(all, "`"));
    const std::string one = config({"optimizer.learning_rate"});
    for (const char* part : {"0.0006", "greater than 0", "peak learning rate"})
        CHECK(contains(one, part));
    CHECK_FALSE(contains(one, "beta1"));
    const std::string section = config({"optimizer"});
    for (const char* part : {"optimizer.beta1 ", "optimizer.grad_clip "})
        CHECK(contains(section, part));
    CHECK_FALSE(contains(section, "schedule."));
    CHECK(config({"--markdown"}) == config_reference());
    check_refused(train_gpt_with({"config", "optimizer.learningrate"}), 2,
                  {"\"optimizer.learningrate\"", "\"optimizer.learning_rate\""});
    check_refused(train_gpt_with({"config", "lr"}), 2, {"\"optimizer.learning_rate\""});
    check_refused(train_gpt_with({"config", "sched"}), 2,
                  {"\"sched\"", "the nearest section is \"schedule\""});
    check_refused(train_gpt_with({"config", "modle"}), 2, {"the nearest section is \"model\""});
    const Outcome none = train_gpt_with({"config", "gelu"});
    check_refused(none, 2, {"\"gelu\"", "train_gpt config"});
    CHECK_FALSE(contains(none.err, "nearest"));
    check_refused(train_gpt_with({"config", "seed", "--schema"}), 2, {"--schema"});
}

TEST_CASE("config --depth prints a configuration that train accepts, each value with its source",
          "[cli]") {
    const TemporaryDirectory directory;
    const auto depth = random_int(1, 40);
    CAPTURE(depth);
    const Outcome outcome =
        check_succeeds(train_gpt_with({"config", "--depth", std::to_string(depth)}));
    const SortedJson json = SortedJson::parse(outcome.out);
    const SortedJson& model = json.at("model");
    CHECK(model.at("n_layer") == depth);
    CHECK(model.at("n_embd") == 64 * depth);
    CHECK(model.at("n_head").get<int64_t>() * model.at("head_size").get<int64_t>() == 64 * depth);
    // Attention has 4·C² parameters, the MLP 3·C·F with 8/3·C, rounded up to a multiple of 256
    const double width = 64.0 * static_cast<double>(depth),
                 hidden = 256 * std::ceil(8 * width / 3 / 256),
                 parameters = static_cast<double>(depth) * (4 * width * width + 3 * width * hidden),
                 tokens = 20 * parameters;
    CHECK(json.at("schedule").at("tokens") == Approx(tokens));
    const double batch = json.at("batch").at("tokens_per_step");
    CHECK(std::exp2(std::round(std::log2(batch))) == batch);
    const double ratio = batch / (0.58 * std::pow(tokens, 0.571));
    CHECK(ratio > 0.7);
    if (batch > 2048) CHECK(ratio < 1.42);
    CHECK(json.at("optimizer").at("learning_rate") ==
          Approx(1.79 * std::pow(parameters, -0.713) * std::pow(tokens, 0.307)).epsilon(0.01));
    for (const auto& [section, values] : json.items()) {
        if (!values.is_object()) continue;
        for (const auto& [name, value] : values.items())
            CHECK(contains(outcome.err, section + "." + name + " "));
    }
    for (const char* source : {"arXiv 2203.15556", "arXiv 2503.04715", "arXiv 2502.15938"})
        CHECK(contains(outcome.err, source));

    const std::string file = directory / "depth.json";
    write(file, outcome.out);
    const Outcome resolved =
        check_succeeds(train_gpt_with({"train", file, "--set", "data.train=synthetic", "--set",
                                       "model.vocab_size=300", "--print-config"}));
    CHECK(SortedJson::parse(resolved.out).at("optimizer").at("learning_rate") ==
          json.at("optimizer").at("learning_rate"));
    for (const char* bad : {"0", "257", "x"})
        check_refused(train_gpt_with({"config", "--depth", bad}), 2, {"--depth"});
    check_refused(train_gpt_with({"config", "seed", "--depth", "2"}), 2, {"--depth"});
}

TEST_CASE("the reference fits into the terminal's width", "[config]") {
    const auto characters = [](const std::string& line) {
        return std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xC0) != 0x80; });
    };
    const auto words_of = [](const std::string& text) {
        std::istringstream in(text);
        return std::vector<std::string>{std::istream_iterator<std::string>(in), {}};
    };
    std::vector<std::string> words;
    for (const int columns : {80, static_cast<int>(random_int(75, 200)), 1000}) {
        const std::string text = config_help("", columns);
        std::istringstream lines(text);
        int64_t widest = 0;
        for (std::string line; std::getline(lines, line);) {
            CAPTURE(line);
            // A word that is too long, such as an address, has a line of its own.
            CHECK((characters(line) <= columns || words_of(line).size() == 1));
            widest = std::max<int64_t>(widest, characters(line));
        }
        if (columns < 200) CHECK(widest > columns - 20);
        const std::vector<std::string> these = words_of(text);
        if (!words.empty()) CHECK(these == words);  // no word is lost where lines break
        words = these;
    }
}

TEST_CASE("data that a script downloads and that is missing is named with the script", "[cli]") {
    CHECK(command_that_makes("data/gpt2") == "scripts/data.sh gpt2");
    CHECK(command_that_makes("data/tinystories/valid/val_*.bin") == "scripts/data.sh tinystories");
    CHECK(command_that_makes("/a/data/quickstart/tokenizer.json") == "make quickstart");
    // Every name in the usage of scripts/data.sh.
    const std::string usage = read("scripts/data.sh");
    const std::regex name("\n#   ([a-z0-9-]+)  ");
    int names = 0;
    for (std::sregex_iterator at(usage.begin(), usage.end(), name), end; at != end; ++at, ++names)
        CHECK(command_that_makes("data/" + (*at)[1].str() + "/x") ==
              "scripts/data.sh " + (*at)[1].str());
    CHECK(names >= 7);
    for (const char* path : {"", "data", "data/mine/train_*.bin", "gpt2", "synthetic"})
        CHECK(command_that_makes(path).empty());

    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string missing = directory / "data/gpt2";
    for (const std::string key : {"tokenizer.path", "data.train", "data.val"}) {
        const Outcome outcome =
            train_gpt_with(w.train(directory / "run", {"--set", key + "=" + missing}));
        check_refused(outcome, 1, {missing, "run scripts/data.sh gpt2"});
    }
    check_refused(train_gpt_with({"tokenize", w.text(), "--tokenizer", missing, "--out",
                                  directory / "shards"}),
                  1, {missing, "run scripts/data.sh gpt2"});
    check_refused(train_gpt_with({"plan", w.config(), "--set", "tokenizer.path=" + missing}), 1,
                  {missing, "run scripts/data.sh gpt2"});
    CHECK_FALSE(fs::exists(directory / "run"));
}
