#include "model/families/gpt2.h"

#include "base/error.h"
#include "model/families/config_file.h"

namespace train_gpt {

namespace {

void defaults(DecoderSpec& spec) {
    if (spec.n_ff == 0) spec.n_ff = 4 * spec.n_embd;
    spec.norm = Norm::layer;
    spec.norm_epsilon = 1e-5;
    spec.mlp = Mlp::gelu;
    spec.biases = Biases::all;
    spec.tied_head = true;
    spec.positions = Positions::learned;
}

bool holds(const DecoderSpec& s) {
    return s.norm == Norm::layer && s.norm_epsilon == 1e-5 && s.mlp != Mlp::swiglu &&
           s.attention_softcap == 0 && s.head_softcap == 0 && s.biases == Biases::all &&
           s.qk_norm == QkNormKind::off && !s.experts && s.window == 0 && !s.sinks && s.tied_head &&
           s.positions == Positions::learned && s.n_kv_head == s.n_head &&
           s.n_head * s.head_size == s.n_embd && s.n_ff == 4 * s.n_embd;
}

/// Hugging Face's names and layout. Initial values as OpenAI's: positions have half the standard
/// deviation of the token embeddings.
constexpr RegistryNames names{.tokens = "wte",
                              .positions = "wpe",
                              .final_norm = "ln_f",
                              .head = "lm_head",
                              .block = "h.",
                              .norm1 = "ln_1",
                              .qkv = "attn.c_attn",
                              .out = "attn.c_proj",
                              .norm2 = "ln_2",
                              .up = "mlp.c_fc",
                              .down = "mlp.c_proj",
                              .transposed = true,
                              .positions_scale = 0.5f};

DecoderSpec read_gpt2(const Family& family, const Json& json, const std::filesystem::path& path) {
    const auto activation =
        optional_field<std::string>(json, "activation_function", "gelu_new", path);
    if (activation != "gelu_new" && activation != "gelu_pytorch_tanh" && activation != "relu2")
        throw Error(path.string(), " has activation_function = \"", activation,
                    "\"; only \"gelu_new\" (tanh approximation) and \"relu2\" are supported");
    const ConfigFile file(json, path);
    const DecoderSpec spec =
        family.spec({.n_layer = file.size("n_layer"),
                     .n_head = file.size("n_head"),
                     .n_embd = file.size("n_embd"),
                     .n_ctx = file.size(json.contains("n_positions") ? "n_positions" : "n_ctx"),
                     .vocab_size = file.size("vocab_size"),
                     .mlp = activation == "relu2" ? Mlp::relu2 : Mlp::gelu,
                     .init_std = file.number("initializer_range", 0.02)},
                    path.string());
    file.only("n_inner", int64_t{spec.n_ff});
    file.only("layer_norm_epsilon", 1e-5);
    file.only("scale_attn_weights", true);
    file.only("scale_attn_by_inverse_layer_idx", false);
    file.only("tie_word_embeddings", true);
    file.only("add_cross_attention", false);
    return spec;
}

Json gpt2_config(const DecoderSpec& spec) {
    return {{"architectures", {"GPT2LMHeadModel"}},
            {"model_type", gpt2.model_type},
            {"vocab_size", spec.vocab_size},
            {"n_positions", spec.n_ctx},
            {"n_ctx", spec.n_ctx},
            {"n_embd", spec.n_embd},
            {"n_layer", spec.n_layer},
            {"n_head", spec.n_head},
            {"n_inner", nullptr},
            {"activation_function", spec.mlp == Mlp::relu2 ? "relu2" : "gelu_new"},
            {"layer_norm_epsilon", 1e-5},
            {"initializer_range", spec.init_std},
            {"resid_pdrop", 0.0},
            {"embd_pdrop", 0.0},
            {"attn_pdrop", 0.0},
            {"scale_attn_weights", true},
            {"tie_word_embeddings", true},
            {"use_cache", true}};
}

/// Masks that follow from the shape, which older versions of transformers saved.
bool is_mask(const std::string& name) {
    return name.starts_with("h.") &&
           (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"));
}

}  // namespace

const Family gpt2{.model_type = "gpt2",
                  .title = "GPT-2",
                  .prefix = "transformer.",
                  .defaults = defaults,
                  .holds = holds,
                  .registry = [](const DecoderSpec& spec) { return decoder_registry(spec, names); },
                  .read = read_gpt2,
                  .config = gpt2_config,
                  .is_buffer = is_mask};

}  // namespace train_gpt
