// The families' config.json files, against those of transformers (test/fixtures/*-tiny) and against
// themselves.
#include <algorithm>
#include <array>

#include "base/json_file.h"
#include "model/families/family.h"
#include "model/families/gpt2.h"
#include "model/families/gpt_oss.h"
#include "model/families/llama.h"
#include "model/families/mistral.h"
#include "model/families/mixtral.h"
#include "model/families/olmoe.h"
#include "model/families/qwen2.h"
#include "model/families/qwen2_moe.h"
#include "model/families/qwen3.h"
#include "model/families/qwen3_moe.h"
#include "test/catch.h"
#include "test/model/random_spec.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

const Family* const llama_class_families[] = {&llama,     &qwen2,     &qwen3, &mistral, &mixtral,
                                              &qwen2_moe, &qwen3_moe, &olmoe, &gpt_oss};
const Family* const mixtures[] = {&mixtral, &qwen2_moe, &qwen3_moe, &olmoe, &gpt_oss};

bool is_mixture(const Family* family) {
    return std::ranges::find(mixtures, family) != std::end(mixtures);
}

/// θ where a file leaves it out, in transformers' class.
double default_theta(const Family* family) {
    return family == &mixtral ? 1e6 : family == &gpt_oss ? 150000 : 10000;
}

Json fixture(const Family& family) {
    return read_json(concat("test/fixtures/", family.model_type, "-tiny/config.json"));
}

/// With windows in some layers and sinks, in the files of a family that has them.
DecoderSpec with_windows(DecoderSpec spec) {
    const auto one_of_two = [] { return random_int(0, 1) == 0; };
    if (one_of_two()) {
        spec.window = static_cast<int>(random_int(1, 30));
        spec.window_pattern = std::array{"S", "SL", "LS"}[static_cast<size_t>(random_int(0, 2))];
        if (spec.n_layer == 1) spec.window_pattern = "S";
        spec.sinks = one_of_two();
        if (spec.clamped) spec.clamped->limit = one_of_two() ? 7.0f : 0.3f;
    }
    if (spec.is_rotary() && random_int(0, 3) == 0)
        spec.rope = {.D = spec.head_size,
                     .theta = 100,
                     .scaling = RopeScaling::yarn,
                     .factor = 4,
                     .original_context = 16,
                     .yarn = {.beta_fast = 9, .truncate = one_of_two(), .mscale = 2}};
    spec.family = &family_for(spec);
    return spec;
}

DecoderSpec read_back(const DecoderSpec& spec) {
    return spec.family->read_config(spec.family->config(spec), "config.json");
}

/// Extents that every family takes.
DecoderSettings extents() {
    return {.n_layer = 2, .n_head = 4, .n_embd = 32, .n_ctx = 64, .vocab_size = 100};
}

std::string refusal(const Family& family, const DecoderSettings& settings) {
    return error_of([&] { (void)family.spec(settings, "config"); });
}

/// The config.json of a family's fixture with other entries for its rotation.
Json with_rotation(const Family& family, const Json& entries) {
    Json config = fixture(family);
    for (const char* key : {"rope_parameters", "rope_scaling", "rope_theta"}) config.erase(key);
    config.update(entries);
    return config;
}

}  // namespace

TEST_CASE("a family's config.json says all of a model that it holds", "[families]") {
    for (int repeat = 0; repeat < 400; ++repeat) {
        const DecoderSpec spec = with_windows(random_spec());
        CAPTURE(spec.family->model_type, described(spec));
        CHECK(read_back(spec) == spec);
    }
    for (const Family* family : llama_class_families) {
        const DecoderSpec spec = family->spec(extents());
        CHECK(spec.family == family);
        CHECK(read_back(spec) == spec);
    }
}

TEST_CASE("a family's config.json has the keys and values of transformers'", "[families]") {
    for (const Family* family : llama_class_families) {
        const Json theirs = fixture(*family);
        Json ours = family->config(family->read_config(theirs, "config.json"));
        // That head_dim is the quotient need not be said.
        if (!theirs.contains("head_dim")) ours.erase("head_dim");
        for (const auto& [key, value] : ours.items()) {
            CAPTURE(family->model_type, key, value.dump());
            if (key == "rope_theta" || key == "rope_scaling") continue;  // transformers 4's names
            if (key == "num_experts" && theirs.contains("num_local_experts")) {
                CHECK(theirs.at("num_local_experts") == value);  // transformers 5's name
                continue;
            }
            if (key == "rope_parameters")
                for (const auto& [name, number] : theirs.at(key).items())
                    CHECK(value.at(name) == number);
            else
                CHECK(theirs.at(key) == value);
        }
    }
}

TEST_CASE("the rotation is read as transformers 4 and as transformers 5 write it", "[families]") {
    const Json fives = fixture(llama);
    Json fours = fives;
    const Json rope = fives.at("rope_parameters");
    fours.erase("rope_parameters");
    fours["rope_theta"] = rope.at("rope_theta");
    fours["rope_scaling"] = rope;
    fours["rope_scaling"].erase("rope_theta");
    const DecoderSpec expected = llama.read_config(fives, "config.json");
    REQUIRE(expected.rope.scaling == RopeScaling::llama3);
    CHECK(llama.read_config(fours, "config.json") == expected);
    fours["rope_scaling"]["type"] = fours["rope_scaling"]["rope_type"];
    fours["rope_scaling"].erase("rope_type");
    CHECK(llama.read_config(fours, "config.json") == expected);

    // Files without theta or scaling mean transformers' defaults.
    Json plain = fours;
    plain["rope_scaling"] = nullptr;
    plain.erase("rope_theta");
    const DecoderSpec spec = llama.read_config(plain, "config.json");
    CHECK(spec.rope.scaling == RopeScaling::none);
    CHECK(spec.rope.theta == 10000);
}

// The right values are the frequencies of transformers 5.24, in which 4.57 agrees where it reads
// the entries at all.
TEST_CASE("a rotation that a config.json describes twice is the one of transformers",
          "[families]") {
    const auto factor = static_cast<double>(random_int(2, 9));
    const double theta = random_int(50, 90000);
    const int64_t context = random_int(40, 400), other_context = context + random_int(1, 50);
    const Json linear = {{"rope_type", "linear"}, {"factor", factor}},
               old_linear = {{"type", "linear"}, {"factor", factor}}, plain = {{"type", "default"}};
    const auto with_theta = [&](Json rope) {
        rope["rope_theta"] = theta;
        return rope;
    };
    const auto with_context = [&](Json rope) {
        rope["original_max_position_embeddings"] = context;
        return rope;
    };
    const Json llama3 = {{"rope_type", "llama3"},
                         {"factor", factor},
                         {"low_freq_factor", 2.0},
                         {"high_freq_factor", 8.0}};
    const Json yarn = {{"rope_type", "yarn"},    {"factor", factor},
                       {"beta_fast", 0},         {"beta_slow", nullptr},
                       {"attention_factor", {}}, {"original_max_position_embeddings", context}},
               full_yarn = {{"rope_type", "yarn"},
                            {"factor", factor},
                            {"beta_fast", 20.0},
                            {"beta_slow", 0.5},
                            {"truncate", false},
                            {"attention_factor", 1.25},
                            {"mscale", 0.75},
                            {"mscale_all_dim", 0.5},
                            {"original_max_position_embeddings", context}};
    const RopeFrequencies yarn_at{.theta = theta,
                                  .scaling = RopeScaling::yarn,
                                  .factor = factor,
                                  .original_context = context},
        full_yarn_at{.theta = theta,
                     .scaling = RopeScaling::yarn,
                     .factor = factor,
                     .original_context = context,
                     .yarn = {.beta_fast = 20,
                              .beta_slow = 0.5,
                              .truncate = false,
                              .attention_factor = 1.25,
                              .mscale = 0.75,
                              .mscale_all_dim = 0.5}};
    const RopeFrequencies none{.theta = theta},
        linear_at{.theta = theta, .scaling = RopeScaling::linear, .factor = factor},
        llama3_at{.theta = theta,
                  .scaling = RopeScaling::llama3,
                  .factor = factor,
                  .low_frequency_factor = 2,
                  .high_frequency_factor = 8,
                  .original_context = context};
    RopeFrequencies linear_by_default = linear_at, llama3_at_model = llama3_at;
    linear_by_default.theta = 10000;
    llama3_at_model.original_context = 200;

    struct Case {
        Json entries;
        RopeFrequencies expected;
    };
    const std::vector<Case> cases{
        {{{"rope_theta", theta}, {"rope_scaling", linear}, {"rope_parameters", with_theta(plain)}},
         linear_at},
        {{{"rope_theta", theta}, {"rope_scaling", old_linear}, {"rope_parameters", plain}},
         linear_at},
        {{{"rope_theta", theta}, {"rope_scaling", nullptr}, {"rope_parameters", linear}},
         linear_at},
        {{{"rope_scaling", Json::object()}, {"rope_parameters", with_theta(linear)}}, linear_at},
        {{{"rope_scaling", linear}, {"rope_parameters", nullptr}}, linear_by_default},
        {{{"rope_scaling", with_theta(linear)}}, linear_at},
        {{{"rope_scaling", with_theta(linear)}, {"rope_parameters", with_theta(linear)}},
         linear_at},
        {{{"rope_theta", theta}, {"rope_scaling", plain}, {"rope_parameters", nullptr}}, none},
        {{{"rope_theta", nullptr}, {"rope_parameters", with_theta(plain)}}, none},
        {{{"rope_theta", theta},
          {"rope_scaling", llama3},
          {"original_max_position_embeddings", context}},
         llama3_at},
        {{{"rope_parameters", with_theta(llama3)}, {"original_max_position_embeddings", context}},
         llama3_at},
        {{{"rope_parameters", with_theta(with_context(llama3))},
          {"original_max_position_embeddings", context}},
         llama3_at},
        {{{"rope_parameters", with_theta(with_context(llama3))},
          {"rope_theta", theta},
          {"rope_scaling", with_context(llama3)}},
         llama3_at},
        {{{"rope_parameters", with_theta(llama3)}, {"max_position_embeddings", 200}},
         llama3_at_model},
        {{{"rope_parameters", with_theta(linear)}, {"original_max_position_embeddings", context}},
         linear_at},
        {{{"rope_theta", theta}, {"rope_scaling", yarn}}, yarn_at},
        {{{"rope_parameters", with_theta(yarn)}}, yarn_at},
        {{{"rope_theta", theta}, {"rope_scaling", full_yarn}, {"rope_parameters", nullptr}},
         full_yarn_at},
        {{{"rope_parameters", with_theta(full_yarn)},
          {"original_max_position_embeddings", context}},
         full_yarn_at}};
    for (const Family* family : llama_class_families) {
        for (const auto& [entries, expected] : cases) {
            CAPTURE(family->model_type, entries.dump());
            const DecoderSpec spec = family->read_config(with_rotation(*family, entries), "f");
            RopeFrequencies wanted = expected;
            wanted.D = spec.head_size;
            if (expected == linear_by_default) wanted.theta = default_theta(family);
            CHECK(spec.rope == wanted);
            CHECK(family->read_config(family->config(spec), "f") == spec);
        }
        const auto refused = [&](const Json& entries, const std::vector<const char*>& said) {
            const Json config = with_rotation(*family, entries);
            const std::string error = error_of([&] { (void)family->read_config(config, "a/f"); });
            CAPTURE(family->model_type, entries.dump(), error);
            CHECK(error.starts_with("a/f has "));
            for (const char* text : said) CHECK(contains(error, text));
        };
        Json twice = linear, doubled = linear;
        twice["type"] = "default";
        doubled["factor"] = 2 * factor;
        refused({{"rope_scaling", twice}}, {"type = \"default\"", "rope_type = \"linear\""});
        refused({{"rope_scaling", linear}, {"rope_parameters", doubled}},
                {"rope_scaling", "rope_parameters", "remove one"});
        refused({{"rope_scaling", plain}, {"rope_parameters", linear}}, {"remove one"});
        refused({{"rope_theta", theta + 1}, {"rope_parameters", with_theta(plain)}},
                {"rope_theta", "from rope_parameters"});
        refused({{"rope_theta", theta + 1}, {"rope_scaling", with_theta(linear)}},
                {"rope_theta", "from rope_scaling"});
        refused({{"rope_scaling", linear}, {"rope_parameters", {{"rope_theta", 777}}}},
                {"rope_theta = 777 in rope_parameters",
                 concat(default_theta(family), ", its default").c_str()});
        refused({{"rope_parameters", with_context(llama3)},
                 {"original_max_position_embeddings", other_context}},
                {"original_max_position_embeddings", "remove one"});
        refused({{"rope_scaling", "linear"}}, {"rope_scaling = \"linear\"", "null or an object"});
        refused({{"rope_parameters", {linear}}}, {"rope_parameters = [", "null or an object"});
        refused({{"rope_parameters", {{"full_attention", linear}}}}, {"\"full_attention\""});
        refused({{"rope_parameters", {{"partial_rotary_factor", 0.5}}}}, {"partial_rotary_factor"});
        refused({{"rope_scaling", {{"factor", 2.0}}}}, {"no rope_type"});
        for (const char* type : {"dynamic", "longrope", "su", "mrope", "proportional"})
            refused({{"rope_scaling", {{"type", type}, {"factor", 2.0}}}}, {type, "\"llama3\""});
    }
}

TEST_CASE("variants that compute something else are refused by the name of their key",
          "[families]") {
    const auto refused = [](const Family& family, const char* key, const Json& value,
                            const char* said = nullptr) {
        Json config = fixture(family);
        config[key] = value;
        const std::string error = error_of([&] { (void)family.read_config(config, "folder/f"); });
        CAPTURE(family.model_type, key, value.dump(), error);
        CHECK(contains(error, "folder/f"));
        CHECK(contains(error, said ? said : key));
    };
    for (const Family* family : llama_class_families) {
        refused(*family, "hidden_act", "gelu");
        if (family == &qwen2 || family == &qwen2_moe || family == &mistral || family == &mixtral)
            refused(*family, "attention_bias", true);
        if (!is_mixture(family)) {
            refused(*family, "num_local_experts", 8);
            refused(*family, "num_experts", 8, "num_experts = 8, but models of its model_type");
        }
        refused(*family, "layer_types", {"full_attention", "chunked_attention"},
                "chunked_attention");
        refused(*family, "partial_rotary_factor", 0.5);
        refused(*family, "rope_parameters", {{"rope_type", "yarn"}, {"beta_fast", 32.0}}, "factor");
        refused(*family, "rope_parameters",
                {{"rope_type", "yarn"}, {"factor", 4.0}, {"attention_factor", 0.0}},
                "attention_factor = 0");
        refused(*family, "rope_parameters",
                {{"rope_type", "yarn"}, {"factor", 4.0}, {"beta_slow", 40.0}}, "a beta_slow of 40");
        refused(*family, "rope_parameters",
                {{"rope_type", "yarn"}, {"factor", 4.0}, {"rope_theta", 1.0}}, "above 1");
        refused(*family, "rope_parameters",
                {{"rope_type", "yarn"}, {"factor", 4.0}, {"truncate", 1}}, "truncate");
        refused(*family, "rope_parameters", {{"rope_type", "linear"}}, "factor");
        for (const char* key : {"num_hidden_layers", "num_attention_heads", "hidden_size",
                                "intermediate_size", "max_position_embeddings", "vocab_size"})
            for (const Json& value : {Json(0), Json(-3), Json("2"), Json(nullptr), Json(2.5)})
                refused(*family, key, value);
        refused(*family, "num_key_value_heads", 5);
    }
    refused(llama, "mlp_bias", true);
    for (const auto& [key, value] : {std::pair<const char*, Json>{"activation_function", "relu"},
                                     {"n_inner", 7},
                                     {"layer_norm_epsilon", 1e-6},
                                     {"scale_attn_weights", false},
                                     {"scale_attn_by_inverse_layer_idx", true},
                                     {"tie_word_embeddings", false},
                                     {"add_cross_attention", true}})
        refused(gpt2, key, value);
    refused(mixtral, "router_jitter_noise", 0.1);
    refused(olmoe, "clip_qkv", 8.0);
}

TEST_CASE("biases of attention are read and written by the keys of each class", "[families]") {
    const auto with = [](const Family& family, const char* key, const Json& value) {
        Json config = fixture(family);
        config.erase(key);
        if (!value.is_null()) config[key] = value;
        const DecoderSpec spec = family.read_config(config, "f");
        CAPTURE(family.model_type, key, value.dump());
        CHECK(spec.family == &family);
        CHECK(read_back(spec) == spec);
        if (!value.is_null()) CHECK(family.config(spec).at(key) == value);
        return spec.biases;
    };
    for (const Family* family : {&llama, &qwen3, &qwen3_moe, &olmoe, &gpt_oss}) {
        CHECK(with(*family, "attention_bias", true) == Biases::attention);
        CHECK(with(*family, "attention_bias", false) == Biases::none);
        CHECK(with(*family, "attention_bias", nullptr) ==
              (family == &gpt_oss ? Biases::attention : Biases::none));
    }
    CHECK(with(qwen2_moe, "qkv_bias", true) == Biases::qkv);
    CHECK(with(qwen2_moe, "qkv_bias", false) == Biases::none);
    CHECK(with(qwen2_moe, "qkv_bias", nullptr) == Biases::qkv);
}

namespace {

/// Which layers of a family's model have a window, by letters, and its size; with `changes` to the
/// fixture's config.json (null: the key is left out).
std::string windows_of(const Family& family, int n_layer, const Json& changes) {
    Json config = fixture(family);
    for (const char* key :
         {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
        config.erase(key);
    if (family.model_type != std::string("qwen2_moe")) config["mlp_only_layers"] = Json::array();
    config["num_hidden_layers"] = n_layer;
    config.update(changes);
    const DecoderSpec spec = family.read_config(config, "a/f");
    CAPTURE(family.model_type, n_layer, changes.dump());
    CHECK(spec.family == &family);
    CHECK(read_back(spec) == spec);
    std::string letters;
    for (int i = 0; i < n_layer; ++i) letters += spec.has_window(i) ? 'S' : 'L';
    return spec.window > 0 ? concat(letters, " ", spec.window) : letters;
}

std::string refused_windows(const Family& family, int n_layer, const Json& changes) {
    return error_of([&] { (void)windows_of(family, n_layer, changes); });
}

}  // namespace

// The right layers are transformers 5.24's.
TEST_CASE("sliding windows are in the layers that transformers gives them", "[families]") {
    const Json S = "sliding_attention", L = "full_attention";
    // All layers; files without the key have the class's default.
    CHECK(windows_of(mistral, 3, Json::object()) == "SSS 4096");
    CHECK(windows_of(mistral, 3, {{"sliding_window", nullptr}}) == "LLL");
    CHECK(windows_of(mistral, 3, {{"sliding_window", 9}}) == "SSS 9");
    CHECK(windows_of(mixtral, 3, Json::object()) == "LLL");
    CHECK(windows_of(mixtral, 3, {{"sliding_window", 9}}) == "SSS 9");
    CHECK(windows_of(qwen3_moe, 3, {{"sliding_window", 9}}) == "LLL");
    CHECK(windows_of(qwen3_moe, 3, {{"sliding_window", 9}, {"use_sliding_window", false}}) ==
          "LLL");
    CHECK(windows_of(qwen3_moe, 3, {{"sliding_window", 9}, {"use_sliding_window", true}}) ==
          "SSS 9");
    CHECK(windows_of(qwen3_moe, 3, {{"use_sliding_window", true}}) == "SSS 4096");
    // The layers from max_window_layers on, or those that are listed
    for (const Family* family : {&qwen2, &qwen3}) {
        const auto windows = [&](Json changes) {
            changes["sliding_window"] = 9;
            return windows_of(*family, 4, changes);
        };
        CHECK(windows({{"max_window_layers", 1}}) == "LLLL");
        CHECK(windows({{"max_window_layers", 1}, {"use_sliding_window", true}}) == "LSSS 9");
        CHECK(windows({{"max_window_layers", 0}, {"use_sliding_window", true}}) == "SSSS 9");
        CHECK(windows({{"max_window_layers", 4}, {"use_sliding_window", true}}) == "LLLL");
        CHECK(windows({{"use_sliding_window", true}}) == "LLLL");  // from layer 28 on
        CHECK(windows({{"max_window_layers", 1},
                       {"use_sliding_window", true},
                       {"layer_types", {S, S, L, S}}}) == "SSLS 9");
    }
    CHECK(windows_of(qwen2_moe, 4,
                     {{"use_sliding_window", true},
                      {"sliding_window", 9},
                      {"layer_types", {S, L, L, S}}}) == "SLLS 9");
    // Every other layer, from the first on
    CHECK(windows_of(gpt_oss, 3, Json::object()) == "SLS 128");
    CHECK(windows_of(gpt_oss, 4, {{"sliding_window", 9}}) == "SLSL 9");
    CHECK(windows_of(gpt_oss, 3, {{"layer_types", {L, S, S}}}) == "LSS 128");
    CHECK(windows_of(gpt_oss, 3, {{"layer_types", {L, L, L}}}) == "LLL");

    for (const Family* family : llama_class_families)
        CHECK(contains(refused_windows(*family, 3, {{"layer_types", {L, L}}}),
                       family == &mistral ? "layer_types" : "layer_types for 2 layers"));
    for (const Family* family : {&llama, &olmoe, &mixtral})
        CHECK(
            contains(refused_windows(*family, 2, {{"layer_types", {L, S}}}), "sliding_attention"));
    CHECK(
        contains(refused_windows(mistral, 2, {{"layer_types", {L, S}}}), "all layers the window"));
    for (const Family* family : {&llama, &olmoe})
        CHECK(contains(refused_windows(*family, 2, {{"use_sliding_window", true}}),
                       "use_sliding_window"));
    for (const Family* family : {&mistral, &mixtral})
        CHECK(contains(
            refused_windows(*family, 2, {{"use_sliding_window", false}, {"sliding_window", 9}}),
            "use_sliding_window"));
    for (const Family* family : {&qwen2, &qwen3, &qwen2_moe})
        CHECK(contains(refused_windows(*family, 2, {{"layer_types", {L, S}}}),
                       "use_sliding_window = false"));
    CHECK(contains(
        refused_windows(gpt_oss, 2, {{"sliding_window", nullptr}, {"layer_types", {L, S}}}),
        "sliding_window = null"));
    CHECK(
        contains(refused_windows(qwen2_moe, 2, {{"use_sliding_window", true}}), "add layer_types"));
    CHECK(contains(
        refused_windows(qwen3_moe, 2, {{"use_sliding_window", true}, {"max_window_layers", 1}}),
        "max_window_layers = 1"));
}

TEST_CASE("layers that are said in other words are the same layers", "[families]") {
    DecoderSettings settings = extents();
    settings.n_layer = 6, settings.window = 8;
    const auto pattern_of = [&](const char* said) {
        settings.window_pattern = said;
        return llama.spec(settings).window_pattern;
    };
    CHECK(pattern_of("SSSSSS") == "S");
    CHECK(pattern_of("SLSLSL") == "SL");
    CHECK(pattern_of("SLLSLLS") == "SLL");
    CHECK(pattern_of("SLLSLSLL") == "SLLSL");
    settings.window_pattern = "LLLLLLS";
    CHECK(llama.spec(settings).window == 0);
    settings.window_pattern = "";
    settings.n_expert = 4, settings.n_expert_per_token = 1;
    settings.experts_every = 2, settings.dense_layers = {3, 0, 3, 2};
    CHECK(qwen3_moe.spec(settings).dense_layers == std::vector<int>{3});
}

namespace {

std::string refused_experts(const Family& family, const Json& changes) {
    Json config = fixture(family);
    config.update(changes);
    return error_of([&] { (void)family.read_config(config, "a/f"); });
}

}  // namespace

TEST_CASE("experts are read as transformers reads them", "[families]") {
    for (const Family* family : mixtures) {
        CAPTURE(family->model_type);
        Json config = fixture(*family);
        const Json E =
            config.contains("num_experts") ? config["num_experts"] : config["num_local_experts"];
        // One spelling or the other, or both
        const DecoderSpec spec = family->read_config(config, "f");
        CHECK(spec.experts.n_expert == E);
        for (const char* key : {"num_experts", "num_local_experts"}) {
            for (const char* one : {"num_experts", "num_local_experts"}) config.erase(one);
            CHECK(contains(error_of([&] { (void)family->read_config(config, "f"); }), "experts"));
            config[key] = E;
            CHECK(family->read_config(config, "f") == spec);
        }
        CHECK(contains(refused_experts(*family, {{"num_experts", 3}, {"num_local_experts", 4}}),
                       "num_experts = 3, but num_local_experts = 4"));
        CHECK(contains(refused_experts(*family, {{"num_experts_per_tok", 99}}),
                       "num_experts_per_tok = 99; it must lie between 1 and"));
        CHECK(contains(refused_experts(*family, {{"num_experts_per_tok", 10}}),
                       "a token cannot go to more experts than there are"));

        // Without the key, a token's weights do not add up to 1, but in classes without it.
        config.erase("norm_topk_prob");
        const bool has_key = family != &mixtral && family != &gpt_oss;
        CHECK(family->read_config(config, "f").experts.rule.normalise == !has_key);
        if (has_key) {
            config["norm_topk_prob"] = true;
            CHECK(family->read_config(config, "f").experts.rule.normalise);
        }
    }

    const auto layers = [](const Family& family, int n_layer, const Json& changes) {
        Json config = fixture(family);
        config["num_hidden_layers"] = n_layer;
        for (const char* key :
             {"decoder_sparse_step", "mlp_only_layers", "use_sliding_window", "layer_types"})
            config.erase(key);
        config.update(changes);
        const DecoderSpec spec = family.read_config(config, "f");
        CHECK(read_back(spec) == spec);
        CHECK(spec.family == &family);
        std::string letters;
        for (int i = 0; i < n_layer; ++i) letters += spec.has_experts(i) ? 'E' : 'd';
        return letters;
    };
    for (const Family* family : {&qwen2_moe, &qwen3_moe}) {
        CHECK(layers(*family, 5, Json::object()) == "EEEEE");
        CHECK(layers(*family, 5, {{"decoder_sparse_step", 2}}) == "dEdEd");
        CHECK(layers(*family, 5, {{"decoder_sparse_step", 3}}) == "ddEdd");
        CHECK(layers(*family, 5, {{"mlp_only_layers", {0, 3}}}) == "dEEdE");
        CHECK(layers(*family, 5, {{"mlp_only_layers", {1}}, {"decoder_sparse_step", 2}}) ==
              "dddEd");
        CHECK(contains(refused_experts(*family, {{"mlp_only_layers", {0, 1, 2}}}),
                       "but decoder_sparse_step and mlp_only_layers leave no layer for experts"));
        CHECK(contains(refused_experts(*family, {{"mlp_only_layers", 0}}),
                       "f has mlp_only_layers = 0; it must be a list of layers, counted from 0"));
        CHECK(contains(refused_experts(*family, {{"mlp_only_layers", {0.5}}}), "mlp_only_layers"));
        CHECK(contains(refused_experts(*family, {{"moe_intermediate_size", nullptr}}),
                       "moe_intermediate_size"));
    }
    CHECK(layers(olmoe, 2, {{"decoder_sparse_step", 2}}) == "EE");  // which its class does not read

    const auto n_ff = [](const Family& family) {
        const DecoderSpec spec = family.read_config(fixture(family), "f");
        return std::array{spec.n_ff, spec.experts.n_ff, spec.experts.n_ff_shared};
    };
    CHECK(n_ff(mixtral) == std::array{18, 18, 0});
    CHECK(n_ff(qwen2_moe) == std::array{26, 14, 22});
    CHECK(n_ff(qwen3_moe) == std::array{38, 10, 0});
    CHECK(n_ff(olmoe) == std::array{9, 9, 0});
    CHECK(n_ff(gpt_oss) == std::array{14, 14, 0});
}

TEST_CASE("gpt-oss' clamps and rotation are read, or are those of its class", "[families]") {
    Json config = fixture(gpt_oss);
    const DecoderSpec spec = gpt_oss.read_config(config, "f");
    REQUIRE(spec.clamped);
    CHECK(spec.clamped->limit == 1.5f);
    CHECK(spec.clamped->alpha == 1.702f);
    CHECK(spec.sinks);
    CHECK(gpt_oss.config(spec).at("swiglu_alpha") == 1.702);
    for (const char* key : {"swiglu_limit", "swiglu_alpha", "rope_parameters"}) config.erase(key);
    config["max_position_embeddings"] = 131072;
    const DecoderSpec plain = gpt_oss.read_config(config, "f");
    CHECK(plain.clamped == ClampedSwiglu{});
    CHECK(plain.rope == RopeFrequencies{.D = 16,
                                        .theta = 150000,
                                        .scaling = RopeScaling::yarn,
                                        .factor = 32,
                                        .original_context = 4096,
                                        .yarn = {.truncate = false}});
    CHECK(read_back(plain) == plain);
    config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 77.0}};
    CHECK(gpt_oss.read_config(config, "f").rope == RopeFrequencies{.D = 16, .theta = 77});
    config["swiglu_limit"] = -1;
    CHECK(contains(error_of([&] { (void)gpt_oss.read_config(config, "f"); }), "limit = -1"));
}

TEST_CASE("what a config.json does not say is as in transformers", "[families]") {
    for (const Family* family : llama_class_families) {
        Json config = fixture(*family);
        for (const char* key : {"rms_norm_eps", "tie_word_embeddings", "initializer_range"})
            config.erase(key);
        const DecoderSpec spec = family->read_config(config, "config.json");
        CAPTURE(family->model_type);
        const bool larger = family == &mixtral || family == &olmoe || family == &gpt_oss;
        CHECK(spec.norm_epsilon == (larger ? 1e-5 : 1e-6));
        CHECK_FALSE(spec.tied_head);
        CHECK(spec.init_std == 0.02);
    }
    Json config = fixture(gpt2);
    for (const char* key : {"activation_function", "initializer_range", "layer_norm_epsilon",
                            "n_inner", "scale_attn_weights", "tie_word_embeddings"})
        config.erase(key);
    CHECK(gpt2.read_config(config, "config.json").init_std == 0.02);
}

TEST_CASE("an MLP whose width is left open has as many weights as one of GPT-2's, or few more",
          "[families]") {
    for (int round = 0; round < 50; ++round) {
        DecoderSettings settings = extents();
        settings.n_embd = settings.n_head * 2 * random_int(1, 128);
        const int64_t C = settings.n_embd;
        CHECK(gpt2.spec(settings).n_ff == 4 * C);
        for (const Family* family : llama_class_families) {
            const int64_t n_ff = family->spec(settings).n_ff;
            CAPTURE(family->model_type, C, n_ff);
            CHECK(n_ff % 256 == 0);
            // Three matrices instead of two; a fraction of a column is rounded off.
            CHECK(3 * (n_ff + 1) > 8 * C);
            CHECK(3 * (n_ff - 256) < 8 * C);
        }
    }
}

TEST_CASE("a combination that no family has is kept in files that say so", "[families]") {
    DecoderSettings settings = extents();
    CHECK(gpt2.spec(settings).family == &gpt2);
    settings.n_kv_head = 2;
    const DecoderSpec grouped = gpt2.spec(settings);
    CHECK(grouped.family->model_type == std::string("train_gpt"));
    CHECK(read_back(grouped) == grouped);
    CHECK(contains(beyond_transformers(grouped), "this combination"));
    // ReLU² is one of GPT-2's activations; no class has soft-caps.
    settings.n_kv_head = 0, settings.mlp = Mlp::relu2;
    const DecoderSpec squared = gpt2.spec(settings);
    CHECK(squared.family == &gpt2);
    CHECK(read_back(squared) == squared);
    CHECK(beyond_transformers(squared).empty());
    CHECK(beyond_transformers(llama.spec(settings)) == "mlp = relu2 outside of GPT-2");
    settings.mlp = {}, settings.attention_softcap = 50, settings.head_softcap = 30;
    for (const Family* family : {&gpt2, &llama}) {
        const DecoderSpec capped = family->spec(settings);
        CHECK(capped.family->model_type == std::string("train_gpt"));
        CHECK(read_back(capped) == capped);
        CHECK(beyond_transformers(capped) == "attention_softcap = 50, head_softcap = 30");
    }
    settings = extents();
    CHECK(beyond_transformers(llama.spec(settings)).empty());
    settings.n_ff = 100;
    CHECK(contains(beyond_transformers(gpt2.spec(settings)), "n_ff"));
    settings = extents();
    // Llama's class takes widths that heads divide, whatever their size; Mistral's takes any.
    settings = extents();
    settings.n_embd = 30, settings.head_size = 8;
    CHECK(llama.spec(settings).family == &mistral);
    settings.biases = Biases::qkv;
    CHECK(llama.spec(settings).family == &qwen2);
    settings.biases = Biases::none, settings.qk_norm = QkNormKind::head;
    CHECK(llama.spec(settings).family == &qwen3);
    // Windows and experts
    settings = extents();
    settings.window = 16;
    CHECK(llama.spec(settings).family == &mistral);
    settings.window_pattern = "SL", settings.biases = Biases::qkv;
    CHECK(llama.spec(settings).family == &qwen2);
    settings.biases = {};
    CHECK(beyond_transformers(llama.spec(settings)) == "window = 16 in these layers");
    settings.window = {}, settings.window_pattern = "", settings.sinks = true;
    CHECK(beyond_transformers(llama.spec(settings)) == "sinks outside of gpt-oss");
    settings.sinks = {}, settings.n_expert = 4, settings.n_expert_per_token = 2;
    CHECK(llama.spec(settings).family->model_type == std::string("train_gpt"));
    settings.router_normalise = true;
    CHECK(llama.spec(settings).family == &mixtral);
    settings.qk_norm = QkNormKind::head, settings.dense_layers = {0};
    CHECK(llama.spec(settings).family == &qwen3_moe);
    settings.qk_norm = {};
    CHECK(beyond_transformers(llama.spec(settings)) == "dense layers in such a mixture");
    settings.dense_layers = {}, settings.n_ff_shared = 24;
    CHECK(beyond_transformers(llama.spec(settings)) == "such a shared expert");
    settings.shared_gate = true, settings.biases = Biases::qkv;
    CHECK(llama.spec(settings).family == &qwen2_moe);
    settings.router = RouterScore::sigmoid, settings.router_scale = 2.5;
    settings.selection_bias = true;
    CHECK(beyond_transformers(llama.spec(settings)) ==
          "selection biases (router.balance = bias), router = sigmoid, router_scale = 2.5");
    settings = extents();
    settings.n_embd = 40, settings.head_size = 8, settings.n_ff = 8;
    CHECK(beyond_transformers(olmoe.spec(settings)) ==
          "n_embd = 40 beside heads of 4 · 8 in such a model");
    // One that several families hold stays in the files of its own.
    for (const Family* family : llama_class_families)
        CHECK(&family_for(family->spec(extents())) == family);
}

TEST_CASE("a combination without a meaning is refused in a sentence", "[families]") {
    const auto with = [](auto change) {
        DecoderSettings settings = extents();
        change(settings);
        return settings;
    };
    using S = DecoderSettings;
    const auto refused = [&](const Family& family, const S& settings, const char* said) {
        const std::string error = refusal(family, settings);
        CAPTURE(family.model_type, error);
        CHECK(error.starts_with("config has "));
        CHECK(contains(error, said));
    };
    refused(llama, with([](S& s) { s.n_head = 3; }), "n_head = 3");
    refused(llama, with([](S& s) { s.n_kv_head = 3; }), "n_kv_head = 3");
    refused(llama, with([](S& s) { s.n_kv_head = 8; }), "n_kv_head = 8");
    refused(llama, with([](S& s) { s.head_size = 7; }), "head_size must be even");
    refused(llama, with([](S& s) { s.head_size = 258; }), "head_size = 258");
    refused(llama, with([](S& s) { s.rope_theta = -1; }), "rope_theta = -1");
    refused(llama, with([](S& s) { s.norm_epsilon = 2; }), "norm_epsilon = 2");
    refused(llama, with([](S& s) { s.init_std = 2; }), "init_std = 2");
    refused(llama, with([](S& s) { s.head_softcap = -30; }), "head_softcap = -30");
    refused(gpt2, with([](S& s) { s.attention_softcap = 1e-9; }), "attention_softcap = 1e-09");
    refused(mixtral, with([](S& s) { s.n_expert_per_token = 9; }),
            "n_expert_per_token = 9, but n_expert = 8");
    refused(mixtral, with([](S& s) { s.n_expert = 513; }), "n_expert = 513");
    refused(mixtral, with([](S& s) { s.mlp = Mlp::gelu; }), "set mlp to swiglu");
    refused(mixtral, with([](S& s) { s.dense_layers = {0, 1}; }), "leave no layer for experts");
    refused(mixtral, with([](S& s) { s.dense_layers = {7}; }), "layer 7 among dense_layers");
    refused(llama, with([](S& s) { s.window = 4, s.window_pattern = "SX"; }),
            "window_pattern = \"SX\"");
    refused(gpt2, with([](S& s) { s.qk_norm = QkNormKind::head; }), "set positions to rope");
    refused(gpt2, with([](S& s) { s.rope_scaling.scaling = RopeScaling::linear; }),
            "set positions to rope");
    refused(llama,
            with([](S& s) { s.rope_scaling = {.scaling = RopeScaling::linear, .factor = 0.5}; }),
            "factor of 0.5");
    refused(llama, with([](S& s) {
                s.rope_scaling = {
                    .scaling = RopeScaling::llama3, .factor = 2, .original_context = 8};
            }),
            "n_ctx = 64");
    refused(llama, with([](S& s) {
                s.rope_scaling = {.scaling = RopeScaling::llama3,
                                  .factor = 8,
                                  .low_frequency_factor = 4,
                                  .high_frequency_factor = 4};
            }),
            "low_freq_factor of 4");
}
