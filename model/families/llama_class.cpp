#include "model/families/llama_class.h"

#include <map>
#include <string>

#include "base/error.h"
#include "model/families/config_file.h"
#include "model/families/rope_config.h"

namespace train_gpt {

namespace {

void defaults(DecoderSpec& spec, const LlamaClass& of) {
    if (spec.head_size == 0) spec.head_size = of.head_size;
    // As many weights as 4·n_embd has with two matrices, rounded up to a multiple of 256.
    if (spec.n_ff == 0) spec.n_ff = (8 * spec.n_embd / 3 + 255) / 256 * 256;
    spec.norm = Norm::rms;
    spec.norm_epsilon = of.norm_epsilon;
    spec.mlp = Mlp::swiglu;
    spec.biases = of.biases;
    spec.qk_norm = of.qk_norm;
    spec.tied_head = false;
    spec.positions = Positions::rope;
    spec.rope.theta = of.rope_theta;
    spec.experts = of.experts;
    if (of.experts.shared_gate) spec.experts.n_ff_shared = spec.n_ff;
    if (of.window > 0) spec.window = of.window, spec.window_pattern = "SL";
    spec.sinks = of.sinks;
    if (of.clamped) spec.clamped = ClampedSwiglu{};
}

bool holds(const DecoderSpec& s, const LlamaClass& of) {
    const bool has_biases =
        s.biases == of.biases ||
        (of.bias_key.key && (s.biases == Biases::none || s.biases == of.bias_key.if_true));
    return s.norm == Norm::rms && s.mlp == Mlp::swiglu && s.is_rotary() && has_biases &&
           s.qk_norm == of.qk_norm && s.attention_softcap == 0 && s.head_softcap == 0 &&
           !(of.n_head_divides_n_embd && s.n_embd % s.n_head != 0) &&
           !(of.heads_fill_n_embd && s.n_embd != s.n_head * s.head_size) && s.sinks == of.sinks &&
           s.clamped.has_value() == of.clamped && holds_windows(of.windows, s) &&
           holds_experts(of.experts, of.expert_keys, s);
}

/// With YaRN as gpt-oss has it, where a file says nothing of rotation.
Json with_yarn(Json json) {
    if (!json.contains("rope_scaling") && !json.contains("rope_parameters"))
        json["rope_parameters"] = {
            {"rope_type", "yarn"}, {"factor", 32.0},    {"beta_fast", 32.0},
            {"beta_slow", 1.0},    {"truncate", false}, {"original_max_position_embeddings", 4096}};
    return json;
}

/// A message about settings, with the keys of config.json in place of their names.
std::string in_file_terms(const std::string& message, const LlamaClass& of) {
    const std::map<std::string, std::string> keys = {
        {"n_layer", "num_hidden_layers"},
        {"n_head", "num_attention_heads"},
        {"n_kv_head", "num_key_value_heads"},
        {"head_size", "head_dim"},
        {"n_embd", "hidden_size"},
        {"n_ff", "intermediate_size"},
        {"n_ctx", "max_position_embeddings"},
        {"norm_epsilon", "rms_norm_eps"},
        {"init_std", "initializer_range"},
        {"n_expert", of.expert_keys.n_expert},
        {"n_expert_per_token", "num_experts_per_tok"},
        {"n_ff_expert",
         of.expert_keys.dense_layers ? "moe_intermediate_size" : "intermediate_size"},
        {"n_ff_shared", "shared_expert_intermediate_size"},
        {"experts_every", "decoder_sparse_step"},
        {"dense_layers", "mlp_only_layers"}};
    const auto is_of_name = [](char c) {
        return c == '_' || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
    };
    std::string text;
    for (size_t i = 0; i < message.size();) {
        size_t end = i;
        while (end < message.size() && is_of_name(message[end])) ++end;
        const std::string word = message.substr(i, std::max<size_t>(end - i, 1));
        const auto key = keys.find(word);
        text += key == keys.end() ? word : key->second;
        i += word.size();
    }
    return text;
}

DecoderSpec read_llama_class(const Family& family, const Json& json,
                             const std::filesystem::path& path, const LlamaClass& of) {
    const ConfigFile file(json, path);
    file.only("hidden_act", std::string("silu"));
    file.only("mlp_bias", false);
    const std::string bias_key = of.bias_key.key ? of.bias_key.key : "";
    if (bias_key != "attention_bias") file.only("attention_bias", false);
    file.only("partial_rotary_factor", 1.0);
    const Json only = Json::parse(of.only);
    for (const auto& [key, value] : only.items())
        if (file.has(key.c_str()) && json[key] != value)
            throw Error(path.string(), " has ", key, " = ", to_text(json[key]), "; only ",
                        to_text(value), " is supported");

    DecoderSettings settings{.n_layer = file.size("num_hidden_layers"),
                             .n_head = file.size("num_attention_heads"),
                             .n_embd = file.size("hidden_size"),
                             .n_ctx = file.size("max_position_embeddings"),
                             .vocab_size = file.size("vocab_size"),
                             .n_kv_head = file.optional_size("num_key_value_heads"),
                             .head_size = file.optional_size("head_dim"),
                             .n_ff = file.size("intermediate_size"),
                             .norm_epsilon = file.number("rms_norm_eps", of.file.norm_epsilon),
                             .tied_head = file.flag("tie_word_embeddings", false),
                             .init_std = file.number("initializer_range", 0.02)};
    if (settings.head_size == 0)
        settings.head_size =
            of.file.head_size ? of.file.head_size : settings.n_embd / settings.n_head;
    if (const BiasKey& bias = of.bias_key; bias.key)
        settings.biases = file.flag(bias.key, bias.fallback) ? bias.if_true : Biases::none;
    read_windows(of.windows, json, path, settings);
    read_experts(of.experts, of.expert_keys, json, path, settings);
    if (of.clamped)
        settings.clamped = {
            static_cast<float>(file.number("swiglu_alpha", settings.clamped.alpha)),
            static_cast<float>(file.number("swiglu_limit", settings.clamped.limit))};
    read_rope(of.yarn ? with_yarn(json) : json, path, settings, of.file.rope_theta);
    try {
        return family.spec(settings, path.string());
    } catch (const Error& error) {
        throw Error(path.string(), in_file_terms(error.what() + path.string().size(), of));
    }
}

Json config(const DecoderSpec& spec, const LlamaClass& of) {
    Json json = {{"architectures", {of.architecture}},
                 {"model_type", of.model_type},
                 {"vocab_size", spec.vocab_size},
                 {"max_position_embeddings", spec.n_ctx},
                 {"hidden_size", spec.n_embd},
                 {"intermediate_size", spec.n_ff},
                 {"num_hidden_layers", spec.n_layer},
                 {"num_attention_heads", spec.n_head},
                 {"num_key_value_heads", spec.n_kv_head},
                 {"head_dim", spec.head_size},
                 {"hidden_act", "silu"},
                 {"rms_norm_eps", spec.norm_epsilon},
                 {"initializer_range", spec.init_std},
                 {"attention_dropout", 0.0},
                 {"tie_word_embeddings", spec.tied_head},
                 {"use_cache", true}};
    if (of.bias_key.key) json[of.bias_key.key] = spec.biases != Biases::none;
    write_windows(of.windows, spec, json);
    write_experts(of.expert_keys, spec, json);
    if (of.clamped) {
        json["swiglu_alpha"] = as_written(spec.clamped->alpha);
        json["swiglu_limit"] = as_written(spec.clamped->limit);
    }
    write_rope(spec, json);
    for (const char* always : {of.constants, of.only}) json.update(Json::parse(always));
    return json;
}

}  // namespace

Registry llama_class_registry(const DecoderSpec& spec, const ExpertNames& experts) {
    return decoder_registry(
        spec, {.tokens = "model.embed_tokens",
               .positions = "model.embed_positions",
               .final_norm = "model.norm",
               .head = "lm_head",
               .block = "model.layers.",
               .norm1 = "input_layernorm",
               .qkv = "self_attn.qkv_proj",
               .qkv_parts = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
               .q_norm = "self_attn.q_norm",
               .k_norm = "self_attn.k_norm",
               .out = "self_attn.o_proj",
               .norm2 = "post_attention_layernorm",
               .up = spec.mlp == Mlp::swiglu ? "mlp.gate_up_proj" : "mlp.up_proj",
               .gate_up_parts = {"mlp.gate_proj", "mlp.up_proj"},
               .down = "mlp.down_proj",
               .experts = experts});
}

bool is_llama_class_buffer(const std::string& name) {
    return name.ends_with(".rotary_emb.inv_freq");
}

Family llama_class(const LlamaClass& of) {
    return {
        .model_type = of.model_type,
        .title = of.title,
        .prefix = "",
        .defaults = [of](DecoderSpec& spec) { defaults(spec, of); },
        .holds = [of](const DecoderSpec& spec) { return holds(spec, of); },
        .registry = [of](const DecoderSpec& s) { return llama_class_registry(s, of.expert_names); },
        .read =
            [of](const Family& family, const Json& json, const std::filesystem::path& path) {
                return read_llama_class(family, json, path, of);
            },
        .config = [of](const DecoderSpec& spec) { return config(spec, of); },
        .is_buffer = is_llama_class_buffer};
}

}  // namespace train_gpt
