#include "model/families/llama_class.h"

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
    if (!of.is_gpt_oss) return;
    spec.window = 128, spec.window_pattern = "SL";
    spec.sinks = true, spec.clamped = ClampedSwiglu{};
}

/// Whether experts differ from what the class in transformers computes in nothing but sizes.
bool holds_experts(const DecoderSpec& s, const LlamaClass& of) {
    const ExpertSpec &e = s.experts, &theirs = of.experts;
    if (!e || !theirs) return !e && !theirs;
    ExpertSpec same = e;
    same.n_expert = theirs.n_expert, same.n_expert_per_token = theirs.n_expert_per_token;
    same.n_ff = theirs.n_ff;
    same.n_ff_shared = theirs.n_ff_shared;
    return same == theirs && (e.n_ff_shared > 0) == theirs.shared_gate;
}

bool holds(const DecoderSpec& s, const LlamaClass& of) {
    return s.norm == Norm::rms && s.mlp == Mlp::swiglu && s.is_rotary() && s.biases == of.biases &&
           s.qk_norm == of.qk_norm && s.attention_softcap == 0 && s.head_softcap == 0 &&
           !(of.n_head_divides_n_embd && s.n_embd % s.n_head != 0) && s.sinks == of.is_gpt_oss &&
           s.clamped.has_value() == of.is_gpt_oss && (s.window == 0 || of.is_gpt_oss) &&
           holds_experts(s, of);
}

DecoderSpec read_config(const Family& family, const Json& json, const std::filesystem::path& path) {
    const ConfigFile file(json, path);
    file.only("hidden_act", std::string("silu"));
    file.only("attention_bias", false);
    file.only("mlp_bias", false);
    file.only("use_sliding_window", false);
    file.only("partial_rotary_factor", 1.0);
    for (const Json& type : optional_field(json, "layer_types", Json::array(), path))
        if (type != "full_attention")
            throw Error(path.string(), " has layers of the type ", to_text(type),
                        "; only \"full_attention\" is supported");
    for (const char* experts : {"num_experts", "num_local_experts"})
        if (json.contains(experts))
            throw Error(path.string(), " has ", experts, "; mixtures of experts are not supported");

    DecoderSettings settings{.n_layer = file.size("num_hidden_layers"),
                             .n_head = file.size("num_attention_heads"),
                             .n_embd = file.size("hidden_size"),
                             .n_ctx = file.size("max_position_embeddings"),
                             .vocab_size = file.size("vocab_size"),
                             .n_kv_head = file.optional_size("num_key_value_heads"),
                             .head_size = file.optional_size("head_dim"),
                             .n_ff = file.size("intermediate_size"),
                             .norm_epsilon = file.number("rms_norm_eps", 1e-6),
                             .tied_head = file.flag("tie_word_embeddings", false),
                             .init_std = file.number("initializer_range", 0.02)};
    read_rope(json, path, settings);
    return family.spec(settings, path.string());
}

Json config(const DecoderSpec& spec, const char* architecture) {
    Json json = {{"architectures", {architecture}},
                 {"model_type", spec.family->model_type},
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
    write_rope(spec, json);
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
                if (of.check) of.check(json, path);
                return read_config(family, json, path);
            },
        .config =
            [of](const DecoderSpec& spec) {
                Json json = config(spec, of.architecture);
                json.update(Json::parse(of.constants));
                return json;
            },
        .is_buffer = is_llama_class_buffer};
}

}  // namespace train_gpt
