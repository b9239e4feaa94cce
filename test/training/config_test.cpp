#include "training/config/config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "model/families/family.h"
#include "model/registry.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/config_help.h"
#include "training/config/config_parser.h"
#include "training/config/config_schema.h"
#include "training/config/config_text.h"
#include "training/config/known_data.h"
#include "training/config/load_config.h"
#include "training/config/nearest_key.h"

using namespace train_gpt;

namespace {

using nlohmann::json;

/// The message with which a configuration is refused; empty when it is accepted.
std::string refusal(const std::string& text, const std::vector<std::string>& overrides = {}) {
    try {
        parse_config(text, "my.json", overrides);
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

/// The same for a small valid configuration with overrides.
std::string override_refusal(const std::vector<std::string>& overrides) {
    return refusal(R"({"schedule": {"steps": 100}})", overrides);
}

/// Checks that a message is one sentence on one line that names the file or flag and each of the
/// parts.
void check_names(const std::string& message, const std::vector<std::string>& parts) {
    CAPTURE(message);
    CHECK_FALSE(message.empty());
    CHECK_FALSE(contains(message, "\n"));
    CHECK_FALSE(contains(message, "json.exception"));
    for (const std::string& part : parts) {
        CAPTURE(part);
        CHECK(contains(message, part));
    }
}

std::filesystem::path repository() {
    return std::filesystem::path(__FILE__).parent_path() / ".." / "..";
}

std::vector<std::filesystem::path> presets() {
    std::vector<std::filesystem::path> files;
    for (const auto& file : glob_files((repository() / "configs/*.json").string()))
        if (file.filename() != "schema.json") files.push_back(file);
    return files;
}

/// Parameters of a GPT-2: tied embedding, positions, 12·C² + 13·C per block, the last LayerNorm.
double parameters(const Config& config) {
    const double C = config.model.n_embd, L = config.model.n_layer;
    return (config.model.vocab_size + config.model.n_ctx) * C + L * (12 * C * C + 13 * C) + 2 * C;
}

}  // namespace

TEST_CASE("a configuration takes the file's values and keeps defaults for the rest", "[config]") {
    const Config config = parse_config(R"({
        // comments are tolerated
        "$schema": "schema.json", /* everywhere */
        "run_dir": "runs/a", "seed": 18446744073709551615,
        "model": {"n_layer": 3, "n_head": 2, "n_embd": 8, "n_ctx": 16},
        "batch": {"tokens_per_step": 64, "micro_batch": 2},
        "optimizer": {"learning_rate": 1, "beta1": 0.0},
        "schedule": {"tokens": 1e6}
    })",
                                       "my.json");
    CHECK(config.run_dir == "runs/a");
    CHECK(config.seed == std::numeric_limits<uint64_t>::max());
    CHECK(config.model.n_layer == 3);
    CHECK(config.optimizer.learning_rate == 1.0);
    CHECK(config.optimizer.beta1 == 0.0);
    CHECK(config.optimizer.beta2 == Config{}.optimizer.beta2);
    CHECK(config.schedule.tokens == 1000000);
    CHECK(config.sequence_length() == 16);
    CHECK(config.micro_batches_per_step() == 2);
    CHECK(parse_config(R"({"schedule": {"steps": 1}})", "my.json").batch.micro_batch == 0);
}

TEST_CASE("an unknown key is named with its path, its file and the nearest valid key", "[config]") {
    check_names(refusal(R"({"modle": {"n_layer": 2}})"), {"my.json", "\"modle\"", "\"model\""});
    check_names(refusal(R"({"seeed": 2})"), {"my.json", "\"seeed\"", "\"seed\""});
    check_names(refusal(R"({"model": {"n_layers": 2}})"),
                {"\"model.n_layers\"", "\"model.n_layer\""});
    check_names(refusal(R"({"model": {"n_haed": 2}})"), {"\"model.n_haed\"", "\"model.n_head\""});
    check_names(refusal(R"({"optimizer": {"lerning_rate": 1}})"), {"\"optimizer.learning_rate\""});
    check_names(refusal(R"({"learning_rate": 1})"),
                {"\"learning_rate\"", "\"optimizer.learning_rate\""});
    check_names(refusal(R"({"schedule": {"learning_rate": 1}})"), {"\"optimizer.learning_rate\""});
    check_names(refusal(R"({"optimizer": {"lr": 1}})"), {"\"optimizer.learning_rate\""});
    check_names(refusal(R"({"": 1})"), {"unknown key \"\"", "`train_gpt config` lists"});
    check_names(refusal(R"({"model.n_layer": {"a": 1}})"), {"model.n_layer"});
    check_names(refusal(R"({"optimiser": {}})"), {"\"optimiser\"", "\"optimizer\""});
    check_names(refusal(R"({"model": {"$schema": "x"}})"), {"model.$schema"});
    check_names(override_refusal({"optimizer.learningrate=3e-4"}),
                {"--set optimizer.learningrate=3e-4", "\"optimizer.learning_rate\""});
    check_names(refusal(R"({")" + std::string(100000, 'x') + R"(": 1})"),
                {"`train_gpt config` lists"});
}

TEST_CASE("a key unlike all others gets no suggestion, and a name that other programs use gets one",
          "[config]") {
    for (const char* name : {"gelu", "model.gelu", "x", "optimizer.dropout", "tensor_parallel"}) {
        CAPTURE(name);
        CHECK(nearest_key(name).empty());
    }
    CHECK_FALSE(contains(refusal(R"({"activation": {"gelu": 1}})"), "nearest"));
    CHECK(nearest_key("lr") == "optimizer.learning_rate");
    CHECK(nearest_key("training.max_iters") == "schedule.steps");
    std::set<std::string> keys;
    for (const KeyDescription& key : describe_keys()) {
        CAPTURE(key.path);
        CHECK(nearest_key(key.path) == key.path);
        keys.insert(key.path);
        // With one letter missing the name is no other key's, and the key is suggested.
        std::string wrong = key.path;
        const size_t dot = wrong.rfind('.') + 1, length = wrong.size() - dot;
        if (length < 6) continue;
        wrong.erase(dot + static_cast<size_t>(random_int(0, static_cast<int64_t>(length) - 1)), 1);
        CHECK(nearest_key(wrong) == key.path);
    }
    for (const char* name : {"lr", "max_lr", "min_lr", "eps", "clip_grad", "batch_size", "seq_len",
                             "max_steps", "warmup_iters", "hidden_size", "depth", "out_dir"})
        CHECK(keys.contains(nearest_key(name)));
}

TEST_CASE("a value of the wrong type or range is refused with its path, the value and the rule",
          "[config]") {
    const auto refused = [](const std::string& section, const std::string& key,
                            const std::string& value, const std::string& rule) {
        const std::string member = "{\"" + key + "\": " + value + "}";
        CAPTURE(section, key, value);
        check_names(refusal(section.empty() ? member : "{\"" + section + "\": " + member + "}"),
                    {"my.json", section.empty() ? key : section + "." + key, rule});
    };
    SECTION("whole numbers") {
        for (const char* value :
             {"0", "-1", "-0.5", "1.5", "4097", "\"12\"", "true", "null", "[]", "{}", "1e300",
              "4294967297", "18446744073709551615", "-9223372036854775808",
              "1180591620717411303424", "36893488147419103232", "1e-3"})
            refused("model", "n_layer", value, std::string("= ") + (value[0] == '"' ? value : ""));
        refused("model", "n_layer", "5000", "a whole number from 1 to 4096");
        refused("batch", "tokens_per_step", "1180591620717411303424",
                "a whole number from 1 to 4294967296");
        refused("schedule", "steps", "-9223372036854775809", "a whole number from 0");
        refused("", "seed", "-1", "a whole number of at least 0");
        refused("", "seed", "18446744073709551616", "a whole number of at least 0");
        refused("", "seed", "\"NaN\"", "a whole number of at least 0");
    }
    SECTION("numbers") {
        for (const char* value : {"0", "-1", "\"0.1\"", "\"NaN\"", "false", "null", "[1]", "{}"})
            refused("optimizer", "learning_rate", value, "a number greater than 0");
        for (const char* value : {"1", "1.0", "-0.1", "2"})
            refused("optimizer", "beta1", value, "a number from 0 to 0.9999999");
        // Values that would be 0, 1 or infinite in the optimizer's fp32.
        refused("optimizer", "beta2", "0.9999999999", "a number from 0 to 0.9999999");
        for (const char* value : {"0", "1e-60"})
            refused("optimizer", "epsilon", value, "a number from 1e-37 to 1000000");
        for (const char* value : {"-0.1", "1e300"})
            refused("optimizer", "weight_decay", value, "a number from 0 to 1000000");
        refused("schedule", "final_fraction", "1.1", "a number from 0 to 1");
        refused("sampling", "top_p", "0", "a number greater than 0 and at most 1");
    }
    SECTION("texts") {
        refused("", "run_dir", "5", "a text");
        refused("", "run_dir", "null", "a text");
        refused("", "run_dir", "\"a\\u0000b\"", "a text");
        refused("", "device", "\"gpu\"", "one of \"auto\", \"cpu\" or \"cuda\"");
        refused("precision", "dtype", "\"fp16\"", "\"bf16\"");
        refused("kernels", "attention", "\"flash\"",
                "one of \"auto\", \"own\", \"cudnn\" or \"wgmma\"");
        refused("kernels", "deterministic", "\"sometimes\"", "\"on\" or \"off\"");
        refused("schedule", "decay", "\"cosin\"",
                "\"cosine\", \"linear\", \"constant\" or \"wsd\"");
    }
    SECTION("sections") {
        refused("", "model", "5", "a section");
        refused("", "model", "null", "a section");
        refused("", "optimizer", "\"adamw\"", "a section");
        check_names(refusal("[]"), {"my.json", "one JSON object"});
        check_names(refusal("5"), {"my.json", "one JSON object"});
    }
}

TEST_CASE("numbers that no double can hold and literals that are not JSON are refused",
          "[config]") {
    check_names(refusal(R"({"model": {"n_layer": 2}, "optimizer": {"learning_rate": 1e400}})"),
                {"my.json", "optimizer.learning_rate", "too large"});
    check_names(refusal(R"({"optimizer": {"learning_rate": NaN}})"),
                {"my.json, line 1, column 33"});
    check_names(refusal(R"({"optimizer": {"learning_rate": Infinity}})"), {"line 1, column 33"});
    check_names(refusal(R"({"seed": 0x10})"), {"line 1"});
    check_names(refusal(R"({"seed": 'a'})"), {"line 1"});
}

TEST_CASE("a JSON syntax error is placed by file, line and column", "[config]") {
    check_names(refusal("{\n  \"seed\": 1,\n  \"device\" \"cpu\"\n}"), {"my.json, line 3, column"});
    check_names(refusal("{\n\"seed\": 1,\n}"), {"my.json, line 3, column 1"});
    check_names(refusal("{\"seed\": 1"), {"my.json, line 1, column 11"});
    check_names(refusal("{\"seed\": 1} x"), {"line 1, column 13"});
    check_names(refusal("{\"run_dir\": \"\xff\"}"), {"line 1"});
    check_names(refusal(std::string("\0\0", 2)), {"line 1, column 1"});
    check_names(refusal(""), {"my.json", "empty"});
    check_names(refusal("  \n "), {"my.json", "empty"});
    check_names(refusal(std::string(200000, '[')), {"my.json", "nested more than 1000 levels"});
}

TEST_CASE("a key that stands twice is refused", "[config]") {
    check_names(refusal(R"({"seed": 1, "device": "cpu", "seed": 2})"),
                {"my.json", "\"seed\"", "twice"});
    check_names(refusal(R"({"model": {"n_layer": 1, "n_layer": 1}})"),
                {"\"model.n_layer\"", "twice"});
    check_names(refusal(R"({"model": {}, "model": {}})"), {"\"model\"", "twice"});
    check_names(refusal(R"({"model.n_layer": 3, "model": {"n_layer": 2}})"),
                {"\"model.n_layer\"", "twice"});
    check_names(refusal(R"({"model": {"n_layer": 2}, "model.n_layer": 3})"),
                {"\"model.n_layer\"", "twice"});
    CHECK(refusal(R"({"sampling": {"seed": 1}, "seed": 1, "schedule": {"steps": 1}})") == "");
}

TEST_CASE("overrides take JSON values, bare texts for texts, and apply in order", "[config]") {
    const std::string base = R"({"run_dir": "runs/a", "schedule": {"steps": 100}})";
    const Config config = parse_config(
        base, "my.json",
        {"optimizer.learning_rate=3e-4", "run_dir=runs/b", "device=\"cpu\"",
         "sampling.prompt=In = the \"beginning\"", "seed=5", "seed=7", "model.init_from=123",
         "tokenizer.path=", "data.train=null", "schedule.steps=1e3"});
    CHECK(config.optimizer.learning_rate == 3e-4);
    CHECK(config.run_dir == "runs/b");
    CHECK(config.device == "cpu");
    CHECK(config.sampling.prompt == "In = the \"beginning\"");
    CHECK(config.seed == 7);
    CHECK(config.model.init_from == "123");
    CHECK(config.tokenizer.path.empty());
    CHECK(config.data.train == std::vector<Config::Data::Source>{{"null", 1, "null"}});
    CHECK(config.schedule.steps == 1000);
}

TEST_CASE("every switch takes true, false, \"on\" and \"off\" alike, in JSON and in --set",
          "[config]") {
    const std::vector<std::string> llama{"model.family=llama"};  // whose heads may be normed
    const json schema = json::parse(config_schema());
    int switches = 0;
    for (const auto& [section, rules] : schema.at("properties").items()) {
        if (!rules.contains("properties")) continue;
        for (const auto& [name, rule] : rules["properties"].items()) {
            const json words = rule.value("enum", json::array());
            const auto allows = [&](const json& value) {
                return std::find(words.begin(), words.end(), value) != words.end();
            };
            if (!allows("on") && rule.at("type") != "boolean") continue;
            if (allows("head")) continue;  // model.qk_norm, for which "on" is another word
            ++switches;
            const std::string key = section + "." + name;
            CAPTURE(key);
            for (const auto& [word, value] : {std::pair{"on", true}, {"off", false}}) {
                CHECK(allows(word));
                CHECK(allows(value));
                std::set<std::string> results;
                // What is said of experts needs some, and of a shared one too.
                const json base = {
                    {"schedule", {{"steps", 100}}},
                    {"model", {{"n_expert", 4}, {"n_expert_per_token", 2}, {"n_ff_shared", 8}}}};
                const auto set = [&](const std::string& text) {
                    const std::vector<std::string> overrides{llama[0], key + "=" + text};
                    results.insert(to_json(parse_config(base.dump(), "my.json", overrides)));
                };
                for (const json& written : {json(word), json(value)}) {
                    json file = base;
                    file[section][name] = written;
                    results.insert(to_json(parse_config(file.dump(), "my.json", llama)));
                    set(written.dump());
                }
                set(word);
                REQUIRE(results.size() == 1);
                const json result = json::parse(*results.begin()).at(section).at(name);
                CHECK((result == word || result == value));
            }
            for (const char* other : {"1", "0", "yes", "\"true\"", "null", "True", "\"yes\""})
                check_names(override_refusal({key + "=" + other}),
                            {key, "true or false", "\"on\""});
        }
    }
    CHECK(switches == 23);
}

TEST_CASE("ZeRO's stage is a number or \"auto\", in JSON and in --set", "[config]") {
    const auto stage = [](const std::string& value) {
        const Config file =
            parse_config(R"({"parallel": {"zero": )" + value + "}}", "test", {"schedule.steps=1"});
        return file.parallel.zero;
    };
    CHECK(stage("\"auto\"") == std::nullopt);
    const auto overridden = [](const std::string& value) {
        return parse_config("{}", "test", {"schedule.steps=1", "parallel.zero=" + value})
            .parallel.zero;
    };
    CHECK(overridden("auto") == std::nullopt);
    CHECK(overridden("\"auto\"") == std::nullopt);
    CHECK(Config{}.parallel.zero == 1);
    for (const int number : {0, 1, 2, 3}) {
        CHECK(stage(std::to_string(number)) == number);
        CHECK(overridden(std::to_string(number)) == number);
    }
    for (const std::string bad : {"4", "-1", "1.5", "true", "\"off\"", "\"2\"", "null", "[1]"})
        check_names(refusal(R"({"parallel": {"zero": )" + bad + "}}"),
                    {"parallel.zero", bad, "\"auto\", or a whole number from 0 to 3"});
    check_names(override_refusal({"parallel.zero=automatic"}), {"parallel.zero", "\"auto\""});
}

TEST_CASE("what a backward pass recomputes has an older name", "[config]") {
    CHECK(parse_config(R"({"precision": {"recompute": "block"}})", "test", {"schedule.steps=1"})
              .memory.recompute == Recompute::block);
    CHECK(parse_config("{}", "test", {"schedule.steps=1", "precision.recompute=block"})
              .memory.recompute == Recompute::block);
}

TEST_CASE("exact sums are refused where they cannot give the same bits, and have an older name",
          "[config]") {
    CHECK(Config{}.parallel.sums.is_auto());
    CHECK(parse_config(R"({"parallel": {"reduce_dtype": "bf16"}})", "test", {"schedule.steps=1"})
              .parallel.sums == GradientSums::bf16);
    CHECK(parse_config("{}", "test", {"schedule.steps=1", "parallel.reduce_dtype=bf16"})
              .parallel.sums == GradientSums::bf16);
    const auto refusal = [](const std::vector<std::string>& more) {
        std::vector<std::string> settings{"schedule.steps=1", "parallel.sums=exact",
                                          "batch.sequence_length=8", "model.n_ctx=8"};
        settings.insert(settings.end(), more.begin(), more.end());
        return error_of([&] { parse_config("{}", "test", settings); });
    };
    CHECK(contains(refusal({"parallel.reserved_sms=2"}), "parallel.reserved_sms = 2"));
    // 2,048 gradients in a step, and one more
    CHECK(refusal({"batch.micro_batch=2", "batch.tokens_per_step=32768"}).empty());
    CHECK(contains(refusal({"batch.micro_batch=2", "batch.tokens_per_step=32784"}),
                   "a step has 2049 micro-batches; use batch.micro_batch=3, or parallel.sums="));
    CHECK(contains(
        refusal({"batch.micro_batch=2", "batch.tokens_per_step=16400", "parallel.context=2"}),
        "a step has 1025 micro-batches on 2 context-parallel ranks each"));

    // What is advised works, also with a batch warm-up, whose smallest step limits the micro-batch
    for (int trial = 0; trial < 20; ++trial) {
        const int64_t part = random_int(1, 6), micro = random_int(1, 3),
                      least = micro * random_int(1, 3),
                      steps = part * (6300 / (least * part) + random_int(0, 300));
        std::vector<std::string> settings{
            concat("batch.tokens_per_step=", 8 * least * steps), "batch.warmup_tokens=1000",
            concat("batch.warmup_tokens_per_step=", 8 * least), concat("batch.micro_batch=", micro),
            concat("parallel.context=", random_int(1, 2) == 1 ? 1 : 2)};
        const std::string problem = refusal(settings);
        CAPTURE(settings, problem);
        REQUIRE(contains(problem, "batch.micro_batch="));
        REQUIRE(contains(problem, ", or parallel.sums=fp32"));
        const size_t from = problem.find("; use ") + 6;
        std::istringstream advice(problem.substr(from, problem.find(", or ") - from));
        for (std::string word; advice >> word;)
            if (word != "with") settings.push_back(word);
        CHECK(refusal(settings) == "");
        settings.emplace_back("parallel.sums=fp32");
        CHECK(refusal(settings) == "");
    }
}

TEST_CASE("training data are one glob or a list of sources with weights", "[config]") {
    using Sources = std::vector<Config::Data::Source>;
    const std::string rest = R"(, "schedule": {"steps": 100}})";
    const std::string list =
        R"([{"glob": "a_*.bin", "weight": 2.5, "name": "web"}, {"glob": "b_*.bin"}])";
    const Sources two{{"a_*.bin", 2.5, "web"}, {"b_*.bin", 1, "b_*.bin"}};
    const Config listed =
        parse_config(R"({"data": {"document_mask": true, "train": )" + list + "}" + rest, "a.json");
    CHECK(listed.data.train == two);
    CHECK(listed.data.document_mask);
    CHECK(parse_config(to_json(listed), "again").data.train == two);
    CHECK(parse_config("{" + rest.substr(1), "a.json", {"data.train=" + list}).data.train == two);
    const Config one = parse_config(R"({"data": {"train": "[ab]_*.bin"})" + rest, "a.json",
                                    {"data.document_mask=false"});
    CHECK(one.data.train == Sources{{"[ab]_*.bin", 1, "[ab]_*.bin"}});
    CHECK_FALSE(one.data.document_mask);
    std::string many;
    for (int i = 0; i <= 64; ++i)
        many += concat(i == 0 ? "[" : ", ", "{\"glob\": \"", i, "\"}", i == 64 ? "]" : "");
    for (const auto& [bad, reason] : std::vector<std::pair<std::string, std::string>>{
             {"5", "a list of sources"},
             {"[]", "lists 0 sources"},
             {many, "lists 65 sources; it may be 1 to 64"},
             {"[5]", "source 1 of the list is 5"},
             {R"([{"glob": "a"}, {"weight": 1}])", "source 2 of the list has no glob"},
             {R"([{"glob": "a", "weight": 0}])", "has the weight 0"},
             {R"([{"glob": "a", "weight": "1"}])", R"(has "weight": "1")"},
             {R"([{"glob": "a", "wieght": 1}])", R"(has "wieght": 1)"},
             {R"([{"glob": "a", "name": "x"}, {"glob": "b", "name": "x"}])",
              R"(source 2 of the list has the same name as an earlier source, "x")"},
             {R"([{"glob": "a"}, {"glob": "a"}])", R"(the same name as an earlier source, "a")"},
             {R"([{"glob": "a\u0000"}])", R"(has "glob": "a\u0000")"}}) {
        CAPTURE(bad);
        check_names(refusal(R"({"data": {"train": )" + bad + "}}"),
                    {"my.json", "data.train", reason});
    }
    check_names(refusal(R"({"data": {"document_mask": 1}})"),
                {"data.document_mask", "true or false"});
}

TEST_CASE("a bad override is named as it was typed", "[config]") {
    for (const char* value :
         {"nan", "NaN", "inf", "1e400", "text", "\"1\"", "", "1 2", "{", "0", "-1"}) {
        const std::string text = std::string("optimizer.learning_rate=") + value;
        check_names(override_refusal({text}),
                    {"--set " + text, "optimizer.learning_rate = ", "a number greater than 0"});
    }
    check_names(override_refusal({"model.n_layer=1.5"}), {"1.5", "a whole number from 1 to 4096"});
    check_names(override_refusal({"device=gpu"}), {"--set device=gpu", "\"gpu\"", "\"cuda\""});
    check_names(override_refusal({"model=5"}), {"--set model=5", "section"});
    check_names(override_refusal({"modle.n_layer=5"}), {"\"model.n_layer\""});
    check_names(override_refusal({"run_dir=\xff"}), {"UTF-8"});
    CHECK_THROWS_AS(parse_config("{}", "my.json", {"model.n_layer"}), UsageError);
    CHECK_THROWS_AS(parse_config("{}", "my.json", {"=5"}), UsageError);
    CHECK_THROWS_AS(parse_config("{}", "my.json", {""}), UsageError);
}

TEST_CASE("heads must divide the width, and the nearest width that fits is named", "[config]") {
    check_names(override_refusal({"model.n_embd=770"}),
                {"my.json", "n_embd = 770", "n_head = 12", "768"});
    check_names(override_refusal({"model.n_embd=5"}), {"n_embd = 5", "is 12"});
    check_names(override_refusal({"model.n_embd=5140", "model.n_head=40"}), {"is 5160"});
    check_names(override_refusal({"model.n_head=1"}), {"256", "n_head = 3"});
    CHECK(override_refusal({"model.n_head=3"}) == "");
}

TEST_CASE("the batch must be whole micro-batches that can be counted", "[config]") {
    check_names(override_refusal({"batch.sequence_length=1025"}),
                {"my.json", "1025", "n_ctx = 1024"});
    check_names(override_refusal({"batch.tokens_per_step=10000"}),
                {"10000", "sequences of 1024 tokens", "9216 and 10240"});
    check_names(override_refusal({"batch.tokens_per_step=10000", "batch.micro_batch=4"}),
                {"10000", "4 · 1024 = 4096", "8192 and 12288"});
    check_names(override_refusal({"batch.tokens_per_step=1000"}), {"1024", "the least"});
    check_names(override_refusal({"batch.micro_batch=1048576", "model.n_ctx=16777216"}),
                {"2147483647"});
    CHECK(override_refusal({"batch.tokens_per_step=4096"}) == "");
    // The values that a message proposes are valid.
    const int micro_batch = static_cast<int>(random_int(1, 64)),
              length = static_cast<int>(random_int(1, 1024));
    const int64_t micro = int64_t{micro_batch} * length,
                  tokens = micro * random_int(1, 50) + random_int(1, micro) - 1;
    const std::vector<std::string> sizes = {"batch.micro_batch=" + std::to_string(micro_batch),
                                            "batch.sequence_length=" + std::to_string(length)};
    CAPTURE(micro_batch, length, tokens);
    for (const int64_t proposed : {tokens, tokens / micro * micro, (tokens / micro + 1) * micro}) {
        auto overrides = sizes;
        overrides.push_back("batch.tokens_per_step=" + std::to_string(proposed));
        CHECK(override_refusal(overrides).empty() == (proposed % micro == 0));
    }
}

TEST_CASE("exactly one key says how long the run is, and the warm-up fits into it", "[config]") {
    check_names(refusal("{}"),
                {"my.json", "schedule.steps", "schedule.tokens", "schedule.epochs", "none"});
    check_names(override_refusal({"schedule.tokens=1000000"}), {"two", "0"});
    check_names(override_refusal({"schedule.tokens=1", "schedule.epochs=0.5"}), {"all three"});
    CHECK(override_refusal({"schedule.steps=0", "schedule.epochs=0.5"}) == "");
    check_names(override_refusal({"schedule.warmup_steps=101"}), {"101", "100 steps"});
    CHECK(override_refusal({"schedule.warmup_steps=100"}) == "");
    // With tokens, a run that resumes may have had more and smaller steps: total_steps() refuses.
    CHECK(override_refusal(
              {"schedule.steps=0", "schedule.tokens=1048577", "schedule.warmup_steps=4"}) == "");
    check_names(
        override_refusal({"schedule.steps=1099511627776", "batch.tokens_per_step=4294967296"}),
        {"counted"});
}

TEST_CASE("a list of files is a text, a list, or nothing, in a file and after --set", "[config]") {
    using Texts = std::vector<std::string>;
    Config config;
    for (const auto& [given, wanted] :
         std::vector<std::pair<std::string, Texts>>{{"a.jsonl", {"a.jsonl"}},
                                                    {"\"a.jsonl\"", {"a.jsonl"}},
                                                    {"[ab]*.jsonl", {"[ab]*.jsonl"}},
                                                    {R"(["a.jsonl", "[b]*"])", {"a.jsonl", "[b]*"}},
                                                    {"[]", {}},
                                                    {"x", {"x"}},
                                                    {"", {}}}) {
        apply_override(config, "evaluation.tasks=" + given);
        CHECK(config.evaluation.tasks == wanted);
        read_config(config, to_json(config), "again");
        CHECK(config.evaluation.tasks == wanted);
    }
    for (const std::string given : {"[1]", R"(["a", ""])", R"(["a")", R"([["a"]])"})
        CHECK(contains(error_of([&] { apply_override(config, "evaluation.tasks=" + given); }),
                       "a list of texts"));
}

TEST_CASE("what to_json writes, load_config reads back equal, for every key", "[config]") {
    // A configuration in which every key differs from its default, made from the schema's rules.
    const json schema = json::parse(config_schema());
    const json defaults = json::parse(to_json(Config{}));
    json changed = defaults;
    size_t keys = 0;
    const std::function<void(const json&, json&)> change = [&](const json& rules, json& values) {
        for (const auto& [name, rule] : rules.at("properties").items()) {
            if (name == "$schema") continue;
            json& value = values.at(name);
            if (rule.at("type") == "object") {
                change(rule, value);
                continue;
            }
            ++keys;
            CAPTURE(name);
            CHECK(rule.at("default") == value);
            if (rule.contains("enum")) {
                value = rule.at("enum").back();
            } else if (name == "offload") {
                value = json::parse(R"(["optimizer", "activations"])");
            } else if (name == "fp8_skip") {
                value = {"up", "0.down"};
            } else if (name == "train") {
                value = json::parse(R"([{"glob": "a", "weight": 0.5, "name": "b"}])");
            } else if (value.is_array() && rule.at("items").at("type") == "string") {
                value = {"a b", "c*.jsonl", std::to_string(random_int(0, 99))};
            } else if (value.is_array()) {
                value = {random_int(1, 9), 1};
            } else if (value.is_boolean()) {
                value = !value.get<bool>();
            } else if (value == "auto" && rule.contains("maximum")) {
                value = random_int(0, 64);
            } else if (value.is_string()) {
                value = "a \"quoted\"\n\\ text, Ω " + std::to_string(random_int(0, 1 << 30));
            } else if (value.is_number_float()) {
                const double least = rule.value("minimum", 0.0);
                value = std::uniform_real_distribution<double>(least, least + 0.999)(test_rng());
            } else {
                const auto before = value.get<int64_t>();
                const auto most = static_cast<int64_t>(rule.value("maximum", 1e15));
                value = before + random_int(1, std::min<int64_t>(64, most - before));
            }
        }
    };
    change(schema, changed);
    REQUIRE(keys > 40);
    changed["model"].update(
        {{"n_head", 6}, {"n_embd", 6 * 32}, {"n_kv_head", 2}, {"head_size", 16}, {"n_ff", 62}});
    changed["optimizer"]["state_dtype"] = "bf16";  // not int8 with Muon
    changed["parallel"]["tensor"] = 2;
    changed["parallel"].update({{"pipeline", 2}, {"stages_per_rank", 1}});  // "zero_bubble"
    changed["model"]["n_layer"] = changed["parallel"]["layers_per_stage"][0].get<int>() + 1;
    changed["model"].update({{"rope_original_n_ctx", 1 << 20}, {"rope_theta", 100.5}});
    // Each scaling has keys of its own.
    json other_scaling = {"rope_low_freq_factor", "rope_high_freq_factor"};
    if (random_int(0, 1) == 0) {
        changed["model"].update({{"rope_scaling", "yarn"}});
        changed["model"].update({{"rope_beta_fast", 20.5}, {"rope_beta_slow", 1.5}});
    } else {
        changed["model"].update({{"rope_scaling", "llama3"}});
        changed["model"].update({{"rope_low_freq_factor", 0.5}, {"rope_high_freq_factor", 2.5}});
        other_scaling = {"rope_beta_fast", "rope_beta_slow", "rope_truncate",
                         "rope_attention_factor"};
    }
    for (const std::string key : other_scaling) changed["model"][key] = defaults["model"][key];
    changed["model"].update({{"window_pattern", "SL"}, {"mlp", "swiglu"}, {"bias", "attention"}});
    changed["model"]["qk_norm"] = "head";  // for which "on" is another word
    changed["model"].update({{"n_expert", 20}, {"n_expert_per_token", 3}, {"n_ff_expert", 24}});
    changed["model"].update({{"n_ff_shared", 16}, {"dense_layers", {0}}, {"experts_every", 1}});
    changed["seed"] = std::numeric_limits<uint64_t>::max() - 1;
    changed["parallel"]["context"] = 2;
    // One of the two: ranks that share sequences cannot count an expert's tokens.
    if (random_int(0, 1) == 0)
        changed["model"]["expert_capacity"] = 0.0;
    else
        changed["parallel"]["context"] = 1;
    changed["batch"]["sequence_length"] = 32 * random_int(1, 2);  // for fp8
    const int64_t micro = changed["batch"]["micro_batch"].get<int64_t>() *
                          changed["batch"]["sequence_length"].get<int64_t>();
    changed["batch"]["warmup_tokens_per_step"] = micro;
    changed["batch"]["tokens_per_step"] = 3 * micro;
    changed["schedule"].update({{"steps", 0}, {"tokens", 0}, {"warmup_steps", 17}});

    TemporaryDirectory directory;
    const std::string file = directory / "config.json";
    write_file(file, changed.dump());
    const Config config = load_config(file, {});
    CHECK(json::parse(to_json(config)) == changed);
    write_file(file, to_json(config));
    CHECK(to_json(load_config(file, {})) == to_json(config));
}

TEST_CASE("a missing file and a folder in a file's place are refused by name", "[config]") {
    TemporaryDirectory directory;
    for (const std::string& path : {directory / "none.json", directory.path()}) {
        try {
            load_config(path, {});
            FAIL("accepted " << path);
        } catch (const Error& error) {
            check_names(error.what(), {path});
        }
    }
}

TEST_CASE("every preset is strict JSON that loads, resolved or not", "[config]") {
    REQUIRE(presets().size() >= 18);
    for (const auto& file : presets()) {
        CAPTURE(file.string());
        const json strict = json::parse(read(file));  // refuses comments
        CHECK_FALSE(strict.at("description").get<std::string>().empty());
        const Config config = load_config(file, {});
        CHECK(to_json(parse_config(to_json(config), "resolved")) == to_json(config));
        CHECK(config.run_dir == "runs/" + file.stem().string());
        CHECK(config.sequence_length() == config.model.n_ctx);
    }
}

TEST_CASE("the presets named after published models have their number of parameters", "[config]") {
    const std::vector<std::pair<std::string, double>> published = {
        {"gpt2-124m", 124.4e6},   {"gpt2-350m", 354.8e6}, {"gpt2-774m", 774.0e6},
        {"gpt2-1558m", 1557.6e6}, {"gpt3-125m", 125e6},   {"gpt3-350m", 350e6},
        {"gpt3-760m", 760e6},     {"gpt3-1.3b", 1.3e9},   {"gpt3-2.7b", 2.7e9},
        {"gpt3-6.7b", 6.7e9},     {"gpt3-13b", 13.0e9},   {"gpt3-175b", 175.0e9}};
    for (const auto& [name, count] : published) {
        CAPTURE(name);
        const Config config = load_config(repository() / "configs" / (name + ".json"), {});
        const bool exact =
            name.rfind("gpt2", 0) == 0;  // GPT-2's counts are known to the last parameter
        CHECK(std::abs(parameters(config) / count - 1) < (exact ? 0.0005 : 0.025));
        CHECK(config.model.vocab_size == 50257);
        CHECK(config.model.n_ctx == (exact ? 1024 : 2048));
    }
}

TEST_CASE("the presets of published Llama-class models have all of their parameters", "[config]") {
    const std::vector<std::pair<std::string, int64_t>> published = {
        {"smollm2-135m", 134515008}, {"llama3.2-1b", 1235814400}, {"llama3-8b", 8030261248},
        {"llama3-70b", 70553706496}, {"qwen3-0.6b", 596049920},   {"qwen3-8b", 8190735360},
        {"mistral-7b", 7241732096}};
    for (const auto& [name, count] : published) {
        CAPTURE(name);
        const Config config = load_config(repository() / "configs" / (name + ".json"), {});
        CHECK(registry_of(spec_of(config, config.model.vocab_size)).numel() == count);
    }
}

namespace {

/// The shape of a published mixture.
struct PublishedMixture {
    std::string preset;
    int64_t L, C, H, K, D, V;  // layers, channels, heads of queries and of keys, their size, tokens
    int64_t E, k, F, shared;   // experts, a token's, their width, the shared expert's
    int64_t attention_vectors = 0;  // biases, norms and sinks
    int64_t expert_biases = 0, router_bias = 0;
    double total = 0, active = 0;  // as published
};

}  // namespace

// Totals and active parameters as published: Qwen3's report (arXiv 2505.09388), gpt-oss' model card
// (arXiv 2508.10925, which does not count the embedding as active), Mixtral's paper (arXiv
// 2401.04088), OLMoE's (arXiv 2409.02060), Qwen1.5-MoE's announcement.
TEST_CASE("the presets of published mixtures have all of their parameters, total and active",
          "[config][plan]") {
    const PublishedMixture mixtures[] = {
        {"qwen3-30b-a3b", 48, 2048, 32, 4, 128, 151936, 128, 8, 768, 0, 2 * 128, 0, 0, 30.5e9,
         3.3e9},
        {"gpt-oss-20b", 24, 2880, 64, 8, 64, 201088, 32, 4, 2880, 0, (64 + 2 * 8) * 64 + 2880 + 64,
         2 * 2880 + 2880, 32, 20.91e9, 3.61e9 + 201088.0 * 2880},
        {"mixtral-8x7b", 32, 4096, 32, 8, 128, 32000, 8, 2, 14336, 0, 0, 0, 0, 46.7e9, 12.9e9},
        {"olmoe-1b-7b", 16, 2048, 16, 16, 128, 50304, 64, 8, 1024, 0, 2 * 2048, 0, 0, 6.92e9,
         1.28e9},
        {"qwen1.5-moe-a2.7b", 24, 2048, 16, 16, 128, 151936, 60, 4, 1408, 5632, 3 * 2048, 0, 0,
         14.3e9, 2.7e9}};
    for (const PublishedMixture& m : mixtures) {
        CAPTURE(m.preset);
        const int64_t attention =
                          m.C * (m.H + 2 * m.K) * m.D + m.H * m.D * m.C + m.attention_vectors,
                      expert = 3 * m.C * m.F + m.expert_biases,
                      shared = m.shared > 0 ? 3 * m.C * m.shared + m.C : 0,
                      router = m.C * m.E + m.router_bias,
                      rest = m.L * (attention + 2 * m.C + shared + router) + 2 * m.V * m.C + m.C,
                      total = rest + m.L * m.E * expert, active = rest + m.L * m.k * expert;
        const Config config = load_config(repository() / "configs" / (m.preset + ".json"), {});
        const DecoderSpec spec = spec_of(config, config.model.vocab_size);
        CHECK(registry_of(spec).numel() == total);
        CHECK(registry_of(spec).numel() - spec.idle_parameters() == active);
        CHECK(std::abs(static_cast<double>(total) / m.total - 1) < 0.003);
        CHECK(std::abs(static_cast<double>(active) / m.active - 1) < 0.02);
        CHECK(beyond_transformers(spec) == "");
        CHECK(spec.family->model_type == config.model.family);
        for (const int64_t count : {total, active})
            CHECK(contains(config.description, with_separators(count)));
    }
}

TEST_CASE("where a configuration departs from its family, its model does", "[config]") {
    Config config;
    auto& m = config.model;
    m.family = "llama", m.n_layer = 3, m.n_head = 6, m.n_embd = 42, m.n_ctx = 64;
    m.n_kv_head = 2, m.head_size = 12, m.n_ff = 50;
    m.norm = Norm::layer, m.norm_epsilon = 1e-4, m.mlp = Mlp::gelu, m.bias = Biases::qkv;
    m.qk_norm = QkNormKind::head, m.tied_head = true, m.attention_softcap = 50, m.head_softcap = 30;
    m.init_std = 0.3, m.init_residual_scaling = false, m.init_zero_projections = true;
    m.rope_theta = 77, m.rope_scaling = RopeScaling::llama3, m.rope_factor = 3;
    m.rope_low_freq_factor = 1.5, m.rope_high_freq_factor = 5, m.rope_original_n_ctx = 32;
    const DecoderSpec spec = spec_of(config, 99);
    const DecoderSpec expected{.family = spec.family,
                               .n_layer = 3,
                               .n_head = 6,
                               .n_kv_head = 2,
                               .head_size = 12,
                               .n_embd = 42,
                               .n_ff = 50,
                               .n_ctx = 64,
                               .vocab_size = 99,
                               .norm = Norm::layer,
                               .norm_epsilon = 1e-4,
                               .mlp = Mlp::gelu,
                               .biases = Biases::qkv,
                               .qk_norm = QkNormKind::head,
                               .tied_head = true,
                               .attention_softcap = 50,
                               .head_softcap = 30,
                               .positions = Positions::rope,
                               .rope = {.D = 12,
                                        .theta = 77,
                                        .scaling = RopeScaling::llama3,
                                        .factor = 3,
                                        .low_frequency_factor = 1.5,
                                        .high_frequency_factor = 5,
                                        .original_context = 32},
                               .init_std = 0.3,
                               .init_residual_scaling = false,
                               .init_zero_projections = true};
    CHECK(spec == expected);
}

TEST_CASE("presets between the quickstart's and 124M are named by their number of parameters",
          "[config]") {
    for (const auto& [name, count] :
         {std::pair{"gpt2-10m", 10e6}, {"gpt2-30m", 30e6}, {"gpt2-60m", 60e6}}) {
        CAPTURE(name);
        const Config config =
            load_config(repository() / "configs" / (std::string(name) + ".json"), {});
        CHECK(std::abs(parameters(config) / count - 1) < 0.025);
        CHECK(config.model.vocab_size == 50257);
        CHECK(config.batch.micro_batch == 0);
    }
}

TEST_CASE("the project's scripts make all data that the presets name", "[config]") {
    for (const auto& file : presets()) {
        CAPTURE(file.string());
        const Config config = load_config(file, {});
        REQUIRE(config.data.train.size() == 1);
        for (const std::string& path :
             {config.tokenizer.path, config.data.train[0].glob, config.data.val}) {
            CAPTURE(path);
            CHECK(path.starts_with("data/"));
            CHECK_FALSE(command_that_makes(path).empty());
        }
        // A vocabulary next to the data belongs to the data, and its size is read from it.
        CHECK((config.model.vocab_size == 0) == config.tokenizer.path.ends_with("/tokenizer.json"));
    }
}

TEST_CASE("the schema allows every default and the largest values", "[config]") {
    const json schema = json::parse(config_schema());
    int bounded = 0;
    const std::function<void(const json&)> check = [&](const json& section) {
        for (const auto& [name, property] : section.at("properties").items()) {
            CAPTURE(name);
            if (property.contains("properties")) check(property);
            if (!property.contains("maximum") || !property.contains("default")) continue;
            ++bounded;
            if (!property["default"].is_number()) continue;  // "auto", or a list of none
            CHECK(property["default"] <= property["maximum"]);
            CHECK(property.value("minimum", property.value("exclusiveMinimum", 0.0)) <
                  property["maximum"].get<double>());
        }
    };
    check(schema);
    CHECK(bounded > 10);
    CHECK(schema["properties"]["optimizer"]["properties"]["learning_rate"]["maximum"] == 1e37);
}

TEST_CASE(
    "a list of sources that is not JSON is refused, and a glob with brackets is not taken for one",
    "[config]") {
    for (const char* list :
         {R"([{"glob": "a*.bin",}])", R"([ {"glob": "a*.bin", "weight": 1e999}])"})
        check_names(override_refusal({std::string("data.train=") + list}),
                    {"data.train", "a list"});
    CHECK(override_refusal({"data.train=[ab]*.bin"}).find("data.train") == std::string::npos);
}

TEST_CASE("more micro-batches than can be counted are refused", "[config]") {
    check_names(refusal(R"({"batch": {"tokens_per_step": 4294967296, "micro_batch": 1,
                                      "sequence_length": 1}, "schedule": {"steps": 1}})"),
                {"batch.tokens_per_step", "4294967296 sequences"});
}

TEST_CASE("norms of heads may be called true, wherever they are set", "[config]") {
    for (const auto& [text, kind] : {std::pair{"true", QkNormKind::head},
                                     {"on", QkNormKind::head},
                                     {"false", QkNormKind::off},
                                     {"width", QkNormKind::width}}) {
        CAPTURE(text);
        Config config;
        apply_override(config, concat("model.qk_norm=", text));
        CHECK(config.model.qk_norm == std::optional(kind));
    }
    Config config;
    CHECK(contains(error_of([&] { apply_override(config, "model.qk_norm=1"); }),
                   "model.qk_norm = 1 is not valid: it must be one of"));
}

TEST_CASE("the first layers may be dense by their number", "[config]") {
    Config config;
    apply_override(config, "model.dense_layers=2");
    CHECK(config.model.dense_layers == std::vector{0, 1});
    CHECK(contains(error_of([&] { apply_override(config, "model.dense_layers=-1"); }),
                   "it must be a whole number, or a list of whole numbers, from 0 to 4095"));
    const json key =
        json::parse(config_schema())["properties"]["model"]["properties"]["dense_layers"];
    CHECK(key["type"] == json({"integer", "array"}));
    CHECK(key["maximum"] == 4095);
    CHECK(key["items"]["maximum"] == 4095);
}

TEST_CASE("configs/schema.json is what the binary writes", "[config]") {
    INFO("write it again: build/train_gpt config --schema > configs/schema.json");
    const bool current = read(repository() / "configs/schema.json") == config_schema();
    CHECK(current);
}

TEST_CASE("docs/keys.md is what the binary writes", "[config]") {
    INFO("write it again: build/train_gpt config --markdown > docs/keys.md");
    const bool current = read(repository() / "docs/keys.md") == config_reference();
    CHECK(current);
}

TEST_CASE("schema and reference table name every key that a configuration has", "[config]") {
    const json schema = json::parse(config_schema());
    const std::string reference = config_reference();
    const json config = json::parse(to_json(Config{}));
    const auto check = [&](const std::string& path, const json& rule, const json& value) {
        CAPTURE(path);
        CHECK(rule.at("default") == value);
        CHECK_FALSE(rule.at("description").get<std::string>().empty());
        CHECK(contains(reference, "| `" + path + "` | "));
    };
    CHECK(schema.at("additionalProperties") == false);
    for (const auto& [name, value] : config.items()) {
        const json& rule = schema.at("properties").at(name);
        if (!value.is_object()) {
            check(name, rule, value);
            continue;
        }
        CHECK(rule.at("additionalProperties") == false);
        CHECK(rule.at("properties").size() == value.size());
        for (const auto& [key, inner] : value.items())
            check(name + "." + key, rule.at("properties").at(key), inner);
    }
    std::istringstream lines(reference);
    for (std::string line; std::getline(lines, line);) {
        size_t bars = 0;
        for (size_t i = 0; i < line.size(); ++i)
            bars += line[i] == '|' && (i == 0 || line[i - 1] != '\\');
        CAPTURE(line);
        CHECK(bars == (line.starts_with('|') ? 6 : 0));
    }
}
