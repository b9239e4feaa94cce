#include "model/families/llama.h"

#include "base/error.h"
#include "model/families/config_file.h"
#include "model/families/rope_config.h"

namespace train_gpt {

namespace llama_class {

void defaults(DecoderSpec& spec, double norm_epsilon, double rope_theta) {
    // As many weights as 4·n_embd has with two matrices, rounded up to a multiple of 256.
    if (spec.n_ff == 0) spec.n_ff = (8 * spec.n_embd / 3 + 255) / 256 * 256;
    spec.norm = Norm::rms;
    spec.norm_epsilon = norm_epsilon;
    spec.mlp = Mlp::swiglu;
    spec.biases = Biases::none;
    spec.tied_head = false;
    spec.positions = Positions::rope;
    spec.rope.theta = rope_theta;
}

bool holds(const DecoderSpec& s, Biases biases, bool qk_norm) {
    return s.norm == Norm::rms && s.mlp == Mlp::swiglu && s.is_rotary() && s.biases == biases &&
           s.qk_norm == qk_norm;
}

Registry registry(const DecoderSpec& spec) {
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
               .down = "mlp.down_proj"});
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

/// Frequencies, which older versions of transformers saved.
bool is_buffer(const std::string& name) { return name.ends_with(".rotary_emb.inv_freq"); }

}  // namespace llama_class

const Family llama{
    .model_type = "llama",
    .title = "Llama",
    .prefix = "",
    .defaults = [](DecoderSpec& spec) { llama_class::defaults(spec, 1e-5, 10000); },
    .holds =
        [](const DecoderSpec& s) {  // transformers refuses other widths, whatever head_dim is
            return llama_class::holds(s, Biases::none, false) && s.n_embd % s.n_head == 0;
        },
    .registry = llama_class::registry,
    .read_config =
        [](const Json& json, const std::filesystem::path& path) {
            return llama_class::read_config(llama, json, path);
        },
    .config =
        [](const DecoderSpec& spec) {
            Json json = llama_class::config(spec, "LlamaForCausalLM");
            json["attention_bias"] = false;
            json["mlp_bias"] = false;
            return json;
        },
    .is_buffer = llama_class::is_buffer};

}  // namespace train_gpt
