#include "training/config/config_checks.h"

#include <algorithm>
#include <optional>
#include <regex>
#include <string>
#include <vector>

#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/config_parser.h"
#include "training/config/load_config.h"
#include "training/plan/fit.h"
#include "training/plan/memory_plan.h"

using namespace train_gpt;

namespace {

/// Random settings of a small model, its mesh and its step, some of which do not fit together.
std::vector<std::string> random_settings() {
    const auto one_of = [](std::initializer_list<const char*> texts) {
        return std::string(
            *(texts.begin() + random_int(0, static_cast<int64_t>(texts.size()) - 1)));
    };
    const auto rarely = [] { return random_int(0, 11) == 0; };
    const int64_t T = random_int(1, 12) * 4 + (rarely() ? 1 : 0),
                  heads = std::stoll(one_of({"1", "2", "3", "4", "6", "8", "12"})),
                  kv = rarely() ? random_int(1, heads) : heads / (heads % 2 == 0 ? 2 : 1),
                  width = heads * 8 * random_int(1, 4) + (rarely() ? 1 : 0),
                  B = random_int(0, 1) * random_int(1, 4),
                  tokens = T * std::max<int64_t>(B, 1) * random_int(1, 24) + (rarely() ? 1 : 0);
    const std::string pipeline = one_of({"1", "1", "2", "3", "4"}),
                      schedule = one_of({"1f1b", "interleaved", "gpipe", "zero_bubble"}),
                      stages = pipeline != "1" && (schedule == "interleaved") != rarely()
                                   ? one_of({"2", "3"})
                                   : "1";
    return {"run_dir=r",
            "data.train=synthetic",
            "device=cpu",
            concat("model.family=", one_of({"gpt2", "llama", "qwen2"})),
            concat("model.n_layer=", random_int(1, 12)),
            concat("model.n_head=", heads),
            concat("model.n_kv_head=", kv),
            concat("model.n_embd=", width),
            concat("model.head_size=", rarely() ? random_int(1, 9) : 0),
            concat("model.n_ctx=", T),
            concat("model.vocab_size=", random_int(100, 2000)),
            concat("batch.tokens_per_step=", tokens),
            concat("batch.micro_batch=", B),
            concat("schedule.steps=", random_int(10, 20)),
            concat("parallel.tensor=", one_of({"1", "1", "2", "3", "4"})),
            concat("parallel.context=", one_of({"1", "1", "1", "2", "3"})),
            concat("parallel.pipeline=", pipeline),
            concat("parallel.schedule=", schedule),
            concat("parallel.stages_per_rank=", stages),
            concat("parallel.tensor_chunks=", one_of({"1", "1", "1", "2"})),
            concat("parallel.shard_ranks=", one_of({"0", "0", "0", "2", "3"}))};
}

Config config_of(const std::vector<std::string>& settings) {
    Config config;
    for (const std::string& setting : settings) apply_override(config, setting);
    return config;
}

/// Why so many ranks cannot train with a configuration: the rules between keys, or a step that does
/// not feed them; empty if they can.
std::string refusal(const Config& config, int world) {
    try {
        check_config(config, "test", world);
        const DecoderSpec spec = spec_of(config, config.model.vocab_size);
        fit_into({uint64_t{1} << 50}, {config, spec, DType::fp32, Recompute::none, world},
                 Device{});
        return "";
    } catch (const Error& error) {
        return error.what();
    }
}

/// The settings that a refusal suggests, as alternatives of settings that belong together.
std::vector<std::vector<std::string>> suggestions(const std::string& refusal) {
    std::vector<std::vector<std::string>> found;
    std::smatch m;
    const auto matches = [&](const char* pattern) {
        return std::regex_search(refusal, m, std::regex(pattern));
    };
    if (matches(
            R"(: ([a-z_.]+) = .*; the nearest value that (?:does|fits|can|divides.*) is (\d+))")) {
        found.push_back({m[1].str() + "=" + m[2].str()});
        if (matches(R"(, with (batch\.tokens_per_step=\d+))")) found.back().push_back(m[1]);
    }
    if (matches(R"(nearest n_embd that does is (\d+))"))
        found.push_back({"model.n_embd=" + m[1].str()});
    if (matches(R"(nearest n_head that (?:divides it|works) is (\d+))") ||
        matches(R"(use n_head = (\d+))"))
        found.push_back({"model.n_head=" + m[1].str()});
    if (matches(R"(nearest head_size that works is (\d+))"))
        found.push_back({"model.head_size=" + m[1].str()});
    if (matches(R"(the nearest that (?:are|is): (\d+)(?: and (\d+))?)"))
        for (size_t i = 1; i < m.size(); ++i)
            if (m[i].matched) found.push_back({"batch.tokens_per_step=" + m[i].str()});
    if (matches(R"(the least is (\d+))")) found.push_back({"batch.tokens_per_step=" + m[1].str()});
    if (matches(R"(batch\.tokens_per_step that gives one is (\d+))"))
        found.push_back({"batch.tokens_per_step=" + m[1].str()});
    if (matches("parallel.schedule=1f1b with parallel.stages_per_rank=1 takes any"))
        found.push_back({"parallel.schedule=1f1b", "parallel.stages_per_rank=1"});
    if (matches(R"(((?:(?:parallel|batch)\.[a-z_]+=[0-9a-z\[\]]+(?: with )?)+) works)")) {
        const std::string all = m[1];
        const std::regex each(R"([a-z]+\.[a-z_]+=[^ ]+)");
        found.emplace_back();
        for (std::sregex_iterator at(all.begin(), all.end(), each), end; at != end; ++at)
            found.back().push_back(at->str());
    }
    if (matches(R"((parallel\.tensor(?:_chunks)?=\d+) can)")) found.push_back({m[1]});
    if (matches("cannot feed")) {
        const bool one = contains(refusal, ", and batch.micro_batch=1");
        if (matches(R"(batch\.micro_batch=(\d+)(?: can| or))"))
            found.push_back({"batch.micro_batch=" + m[1].str()});
        if (matches(R"((batch\.tokens_per_step=\d+))")) {
            found.push_back({m[1]});
            if (one) found.back().emplace_back("batch.micro_batch=1");
        }
        if (matches(R"(take (\d+) ranks at most)")) {
            found.push_back({"world=" + m[1].str()});
            if (one) found.back().emplace_back("batch.micro_batch=1");
        }
    }
    return found;
}

}  // namespace

TEST_CASE("whenever a refusal suggests a value, the configuration with that value is accepted",
          "[config][mesh]") {
    int refused = 0, suggested = 0;
    for (int i = 0; i < 400; ++i) {
        const std::vector<std::string> settings = random_settings();
        const int world = static_cast<int>(random_int(2, 16));
        const Config config = config_of(settings);
        const std::string error = refusal(config, world);
        if (error.empty()) continue;
        ++refused;
        const auto all = suggestions(error);
        suggested += !all.empty();
        for (const std::vector<std::string>& changes : all) {
            Config changed = config;
            int ranks = world;
            std::string text;
            for (const std::string& change : changes) {
                text += change + " ";
                if (change.starts_with("world="))
                    ranks = std::stoi(change.substr(6));
                else
                    apply_override(changed, change);
            }
            CAPTURE(settings, world, error, text);
            CHECK(refusal(changed, ranks) == "");
        }
    }
    CHECK(refused > 100);
    CHECK(suggested > refused / 2);
}

TEST_CASE("a suggestion fits the other keys and the number of ranks too", "[config][mesh]") {
    const auto error = [](int world, const std::vector<std::string>& settings) {
        std::vector<std::string> all{"run_dir=r", "data.train=synthetic", "schedule.steps=1",
                                     "model.n_embd=48"};
        all.insert(all.end(), settings.begin(), settings.end());
        return refusal(config_of(all), world);
    };
    // Two stages on each of 4 ranks are more than 6 layers: another schedule, or fewer ranks.
    const std::string interleaved =
        error(4, {"model.n_layer=6", "model.n_head=6", "parallel.pipeline=4",
                  "parallel.schedule=interleaved", "model.vocab_size=500"});
    CAPTURE(interleaved);
    CHECK(contains(interleaved, "parallel.stages_per_rank = 1 does not fit"));
    CHECK(contains(interleaved, "; parallel.schedule=1f1b works"));
    CHECK_FALSE(contains(interleaved, "nearest value"));
    const std::vector<std::string> heads{"model.n_head=6", "parallel.tensor=4",
                                         "model.vocab_size=2000"};
    CHECK(contains(error(8, heads), "cannot share model.n_head = 6 evenly"));
    CHECK(contains(error(8, heads), " is 2"));
    // 3 ranks cannot share the 1024 tokens of a sequence, but those of a shorter one.
    CHECK(contains(error(6, heads), " is 2"));
    std::vector<std::string> shorter = heads;
    shorter.insert(shorter.end(), {"batch.sequence_length=768", "batch.tokens_per_step=6144"});
    CHECK(contains(error(6, shorter), " is 3"));
    CHECK(contains(error(8, {"model.n_head=6", "parallel.tensor=3", "model.vocab_size=2000"}),
                   "parallel.tensor = 3 does not divide the 8 ranks of this run; the nearest value "
                   "that does is 2"));
    CHECK(contains(error(4, {"model.n_head=4", "parallel.tensor=4", "model.vocab_size=300"}),
                   "parallel.tensor=2 can"));
    // 16777220 would be nearer, but is more than the key takes.
    CHECK(contains(error(5, {"model.n_head=4", "model.n_ctx=16777216", "parallel.context=5",
                             "model.vocab_size=300", "batch.tokens_per_step=83886080"}),
                   "the nearest value that can is 16777210, with batch.tokens_per_step="));
}

TEST_CASE("what is about experts is refused for a model that has none", "[config]") {
    const auto error = [](std::vector<std::string> settings) {
        settings.insert(settings.begin(), {"run_dir=r", "data.train=synthetic", "schedule.steps=1",
                                           "model.vocab_size=500"});
        return refusal(config_of(settings), 1);
    };
    for (const auto& [setting, neutral] :
         std::vector<std::pair<std::string, std::string>>{{"model.n_expert_per_token=2", "0"},
                                                          {"model.n_ff_expert=64", "0"},
                                                          {"model.n_ff_shared=64", "\"auto\""},
                                                          {"model.shared_gate=on", "\"auto\""},
                                                          {"model.router=sigmoid", "\"auto\""},
                                                          {"model.router_normalise=on", "\"auto\""},
                                                          {"model.router_scale=2", "0.0"},
                                                          {"model.router_bias=on", "\"auto\""},
                                                          {"model.expert_bias=on", "\"auto\""},
                                                          {"model.expert_capacity=1.25", "0.0"},
                                                          {"model.dense_layers=1", "[]"},
                                                          {"model.experts_every=2", "1"},
                                                          {"router.balance=bias", "\"loss\""},
                                                          {"router.level=sequence", "\"step\""},
                                                          {"router.balance_rate=0.1", "0.0"},
                                                          {"router.z_loss=0.1", "0.0"}}) {
        CAPTURE(setting);
        const std::string key = setting.substr(0, setting.find('='));
        const std::string said = error({setting});
        CHECK(contains(said, key + " = "));
        CHECK(contains(said, " is about experts, and the model has none; set it to " + neutral +
                                 ", or set model.n_expert"));
        CHECK(error({key + "=" +
                     (neutral[0] == '"' ? neutral.substr(1, neutral.size() - 2) : neutral)}) == "");
    }
    for (const char* none : {"model.n_ff_shared=0", "model.shared_gate=off", "router.balance=none"})
        CHECK(error({none}) == "");
}

TEST_CASE("a setting that no other setting lets count is refused", "[config]") {
    const auto error = [](std::vector<std::string> settings) {
        settings.insert(settings.begin(),
                        {"run_dir=r", "data.train=synthetic", "schedule.steps=1",
                         "model.family=llama", "model.vocab_size=500", "model.n_layer=3"});
        return refusal(config_of(settings), 1);
    };
    const std::vector<std::string> experts{"model.n_expert=4", "model.n_expert_per_token=2"};
    const auto with = [](std::vector<std::string> settings, const std::string& more) {
        settings.push_back(more);
        return settings;
    };
    struct Case {
        std::string setting;
        std::vector<std::string> refused_with, accepted_with;
        std::string said;
    };
    for (const Case& c : std::vector<Case>{
             {"model.window_pattern=SL",
              {},
              {"model.window=16"},
              "says which layers have a window, and none has one; set it to \"\", or set "
              "model.window"},
             {"router.level=sequence", with(experts, "router.balance=bias"), experts,
              "is about the loss that balances experts, and router.balance is another; set it to "
              "\"step\", or set router.balance=loss"},
             {"router.balance_rate=0.5", with(experts, "router.balance=none"),
              with(experts, "router.balance=bias"),
              "balances experts, and router.balance = none; set it to 0.0, or set router.balance "
              "to loss or bias"},
             {"model.rope_factor=2",
              {},
              {"model.rope_scaling=linear"},
              "is about scaled frequencies, and model.rope_scaling = none; set it to 1.0"},
             {"model.rope_original_n_ctx=512",
              {"model.rope_scaling=linear"},
              {"model.rope_scaling=yarn", "model.rope_factor=2"},
              "is about model.rope_scaling = llama3 or yarn, and it is neither; set it to 8192"},
             {"model.rope_low_freq_factor=2",
              {"model.rope_scaling=yarn"},
              {"model.rope_scaling=llama3", "model.rope_factor=2"},
              "is about model.rope_scaling = llama3, and it is another; set it to 1.0"},
             {"model.rope_high_freq_factor=8",
              {},
              {"model.rope_scaling=llama3"},
              "is about model.rope_scaling = llama3, and it is another; set it to 4.0"},
             {"model.rope_beta_fast=20",
              {"model.rope_scaling=llama3"},
              {"model.rope_scaling=yarn"},
              "is about model.rope_scaling = yarn, and it is another; set it to 32.0"},
             {"model.rope_beta_slow=2",
              {},
              {"model.rope_scaling=yarn"},
              "is about model.rope_scaling = yarn, and it is another; set it to 1.0"},
             {"model.rope_attention_factor=2",
              {"model.rope_scaling=linear"},
              {"model.rope_scaling=yarn"},
              "is about model.rope_scaling = yarn, and it is another; set it to 0.0"}}) {
        CAPTURE(c.setting);
        const std::string said = error(with(c.refused_with, c.setting));
        CHECK(contains(said, c.setting.substr(0, c.setting.find('=')) + " = "));
        CHECK(contains(said, c.said));
        CHECK(error(c.refused_with) == "");
        CHECK(error(with(c.accepted_with, c.setting)) == "");
    }
    // A pattern in which no layer has the window
    CHECK(
        contains(error({"model.window=16", "model.window_pattern=LL"}),
                 "model.window_pattern = \"LL\" gives none of the 3 layers the window; add an S"));
    CHECK(
        contains(error({"model.window=16", "model.window_pattern=LLLS"}), "none of the 3 layers"));
    CHECK(error({"model.window=16", "model.window_pattern=LLS"}) == "");
}

TEST_CASE("a mixture's counts of a step fit into their integers", "[config]") {
    const int per_token = random_int(2, 8);
    const int64_t most = std::numeric_limits<int32_t>::max() / per_token;
    const auto error = [&](int64_t sequences) {
        return refusal(
            config_of({"run_dir=r", "data.train=synthetic", "schedule.steps=1",
                       "model.vocab_size=500", "model.family=olmoe", "model.n_ctx=1024",
                       concat("model.n_expert_per_token=", per_token), "batch.micro_batch=1",
                       concat("batch.tokens_per_step=", 1024 * sequences)}),
            1);
    };
    CHECK(error(most / 1024) == "");
    CHECK(
        contains(error(most / 1024 + 1), concat(" with ", per_token,
                                                " experts a token is too many for the counts of a "
                                                "step; ",
                                                most, " is the most")));
}

TEST_CASE("a capacity of experts needs experts, and whole sequences", "[config]") {
    const auto error = [](int world, const std::vector<std::string>& settings) {
        std::vector<std::string> all{"run_dir=r", "data.train=synthetic", "schedule.steps=1",
                                     "model.vocab_size=500"};
        all.insert(all.end(), settings.begin(), settings.end());
        try {
            return refusal(config_of(all), world);
        } catch (const Error& refused) {
            return std::string(refused.what());
        }
    };
    CHECK(contains(error(1, {"model.expert_capacity=1.25"}),
                   "model.expert_capacity = 1.25 is about experts, and the model has none; set it "
                   "to 0.0, or set model.n_expert"));
    const std::vector<std::string> mixture{"model.family=olmoe", "model.expert_capacity=1.25"};
    CHECK(error(1, mixture) == "");
    std::vector<std::string> split = mixture;
    split.push_back("parallel.context=2");
    CHECK(contains(error(2, split),
                   "model.expert_capacity = 1.25 counts the tokens of whole sequences, but "
                   "parallel.context = 2 ranks have parts of them; set model.expert_capacity to 0 "
                   "or parallel.context to 1"));
    CHECK(contains(error(1, {"model.family=olmoe", "model.expert_capacity=-1"}),
                   "model.expert_capacity"));
}

TEST_CASE("numbers and sizes of heads that do not fit are answered with the nearest that do",
          "[config]") {
    const auto error = [](const std::vector<std::string>& settings) {
        std::vector<std::string> all{"schedule.steps=1"};
        all.insert(all.end(), settings.begin(), settings.end());
        return error_of([&] { parse_config("{}", "test", all); });
    };
    CHECK(contains(
        error({"model.n_embd=192", "model.n_head=5"}),
        "the nearest n_embd that does is 190, and the nearest n_head that divides it is 4"));
    CHECK(contains(error({"model.n_embd=192", "model.n_head=5", "parallel.tensor=3"}),
                   "nearest n_head that divides it is 6"));
    CHECK(contains(error({"model.family=llama", "model.n_embd=60", "model.n_head=4"}),
                   "the nearest n_head that works is 3"));
    CHECK(contains(error({"model.family=llama", "model.head_size=7"}),
                   "the nearest head_size that works is 6"));
    CHECK(contains(error({"model.family=llama", "model.n_kv_head=5"}),
                   "model.n_kv_head = 5 does not divide model.n_head = 12, and each key/value head "
                   "serves the same number of query heads; the nearest value that does is 4"));
    CHECK(contains(error({"model.family=llama", "model.n_kv_head=24"}),
                   "the nearest value that does is 12"));
    CHECK(
        contains(error({"model.n_kv_head=3", "model.family=llama", "parallel.tensor=2"}), " is 1"));
}

TEST_CASE("the presets of the first hour feed two ranks along every axis", "[config][mesh]") {
    for (const char* preset : {"quickstart", "tinyshakespeare", "tinystories", "llama-10m",
                               "gpt2-10m", "gpt2-30m", "gpt2-60m", "gpt2-124m"})
        for (const char* axis : {"parallel.zero=1", "parallel.tensor=2", "parallel.context=2",
                                 "parallel.pipeline=2"}) {
            CAPTURE(preset, axis);
            Config config = load_config(concat("configs/", preset, ".json"), {axis});
            if (config.model.vocab_size == 0) config.model.vocab_size = 1024;
            CHECK(config.batch.micro_batch == 0);
            CHECK(refusal(config, 2) == "");
        }
}
