// The families' config.json files, against those of transformers (test/fixtures/*-tiny) and against
// themselves.
#include "base/json_file.h"
#include "model/families/family.h"
#include "model/families/llama.h"
#include "model/families/mistral.h"
#include "model/families/qwen2.h"
#include "model/families/qwen3.h"
#include "test/catch.h"
#include "test/model/random_spec.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

const Family* const llama_class_families[] = {&llama, &qwen2, &qwen3, &mistral};

Json fixture(const Family& family) {
    return read_json(concat("test/fixtures/", family.model_type, "-tiny/config.json"));
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

}  // namespace

TEST_CASE("a family's config.json says all of a model that it holds", "[families]") {
    for (int repeat = 0; repeat < 200; ++repeat) {
        const DecoderSpec spec = random_spec();
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
        refused(*family, "attention_bias", true);
        refused(*family, "num_local_experts", 8);
        refused(*family, "num_experts", 8);
        refused(*family, "layer_types", {"full_attention", "sliding_attention"},
                "sliding_attention");
        refused(*family, "partial_rotary_factor", 0.5);
        refused(*family, "rope_parameters", {{"rope_type", "yarn"}, {"factor", 4.0}}, "yarn");
        refused(*family, "rope_parameters", {{"rope_type", "linear"}}, "factor");
        for (const char* key : {"num_hidden_layers", "num_attention_heads", "hidden_size",
                                "intermediate_size", "max_position_embeddings", "vocab_size"})
            for (const Json& value : {Json(0), Json(-3), Json("2"), Json(nullptr), Json(2.5)})
                refused(*family, key, value);
        refused(*family, "num_key_value_heads", 5, "n_kv_head = 5");
    }
    refused(llama, "mlp_bias", true);
    refused(qwen2, "use_sliding_window", true);
    refused(qwen3, "use_sliding_window", true);
    refused(mistral, "sliding_window", 4096);
    Json default_window = fixture(mistral);
    REQUIRE(default_window.erase("sliding_window") == 1);
    CHECK(contains(error_of([&] { (void)mistral.read_config(default_window, "folder/f"); }),
                   "sliding_window = 4096, the default of its class"));
}

TEST_CASE("a combination that no family has is kept in files that say so", "[families]") {
    DecoderSettings settings = extents();
    CHECK(gpt2.spec(settings).family == &gpt2);
    settings.n_kv_head = 2;
    const DecoderSpec grouped = gpt2.spec(settings);
    CHECK(grouped.family->model_type == std::string("train_gpt"));
    CHECK(read_back(grouped) == grouped);
    // Llama's class takes widths that heads divide, whatever their size; Mistral's takes any.
    settings = extents();
    settings.n_embd = 30, settings.head_size = 8;
    CHECK(llama.spec(settings).family == &mistral);
    settings.biases = Biases::qkv;
    CHECK(llama.spec(settings).family == &qwen2);
    settings.biases = Biases::none, settings.qk_norm = true;
    CHECK(llama.spec(settings).family == &qwen3);
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
    refused(gpt2, with([](S& s) { s.qk_norm = true; }), "set positions to rope");
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
