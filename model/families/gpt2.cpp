#include "model/families/gpt2.h"

#include "base/error.h"
#include "base/json_file.h"

namespace train_gpt {

namespace {

DecoderSpec spec_of(const DecoderSize& size) {
    const int n_head = static_cast<int>(size.n_head), n_embd = static_cast<int>(size.n_embd);
    return {.family = &gpt2,
            .n_layer = static_cast<int>(size.n_layer),
            .n_head = n_head,
            .n_kv_head = n_head,
            .head_size = n_embd / n_head,
            .n_embd = n_embd,
            .n_ff = 4 * n_embd,
            .n_ctx = static_cast<int>(size.n_ctx),
            .vocab_size = size.vocab_size};
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
                              .init_std = 0.02f,
                              .positions_std = 0.01f};

DecoderSpec read_config(const Json& json, const std::filesystem::path& path) {
    const auto activation =
        optional_field<std::string>(json, "activation_function", "gelu_new", path);
    if (activation != "gelu_new" && activation != "gelu_pytorch_tanh")
        throw Error(path.string(), " has activation_function = \"", activation,
                    "\"; only \"gelu_new\" (tanh approximation) is supported");
    const auto size_of = [&](const char* key) { return field<int64_t>(json, key, path); };
    const DecoderSpec spec =
        spec_of(checked({.n_layer = size_of("n_layer"),
                         .n_head = size_of("n_head"),
                         .n_embd = size_of("n_embd"),
                         .n_ctx = size_of(json.contains("n_positions") ? "n_positions" : "n_ctx"),
                         .vocab_size = size_of("vocab_size")},
                        path.string()));
    // Settings with which the same weights compute another function.
    const auto only = [&](const char* key, auto supported) {
        if (optional_field(json, key, supported, path) != supported)
            throw Error(path.string(), " has ", key, " = ", to_text(json[key]), "; only ",
                        to_text(supported), " is supported");
    };
    only("n_inner", int64_t{spec.n_ff});
    only("layer_norm_epsilon", 1e-5);
    only("scale_attn_weights", true);
    only("scale_attn_by_inverse_layer_idx", false);
    only("tie_word_embeddings", true);
    only("add_cross_attention", false);
    return spec;
}

Json config_of(const DecoderSpec& spec) {
    return {{"architectures", {"GPT2LMHeadModel"}},
            {"model_type", gpt2.model_type},
            {"vocab_size", spec.vocab_size},
            {"n_positions", spec.n_ctx},
            {"n_ctx", spec.n_ctx},
            {"n_embd", spec.n_embd},
            {"n_layer", spec.n_layer},
            {"n_head", spec.n_head},
            {"n_inner", nullptr},
            {"activation_function", "gelu_new"},
            {"layer_norm_epsilon", 1e-5},
            {"initializer_range", 0.02},
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
                  .spec = spec_of,
                  .registry = [](const DecoderSpec& spec) { return decoder_registry(spec, names); },
                  .read_config = read_config,
                  .config = config_of,
                  .is_buffer = is_mask};

}  // namespace train_gpt
