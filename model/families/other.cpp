#include "model/families/other.h"

#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/json_file.h"
#include "model/families/llama_class.h"

namespace train_gpt {

namespace {

constexpr std::pair<const char*, Norm> norms[] = {{"layernorm", Norm::layer},
                                                  {"rmsnorm", Norm::rms}};
constexpr std::pair<const char*, Mlp> mlps[] = {
    {"gelu", Mlp::gelu}, {"swiglu", Mlp::swiglu}, {"relu2", Mlp::relu2}};
constexpr std::pair<const char*, Biases> all_biases[] = {
    {"none", Biases::none}, {"qkv", Biases::qkv}, {"all", Biases::all}};
constexpr std::pair<const char*, Positions> all_positions[] = {{"learned", Positions::learned},
                                                               {"rope", Positions::rope}};
constexpr std::pair<const char*, RopeScaling> scalings[] = {
    {"none", RopeScaling::none}, {"linear", RopeScaling::linear}, {"llama3", RopeScaling::llama3}};

template <class Value, size_t n>
const char* name_of(Value value, const std::pair<const char*, Value> (&names)[n]) {
    for (const auto& [name, known] : names)
        if (known == value) return name;
    return "";
}

template <class Value, size_t n>
Value value_of(const Json& json, const char* key, const std::filesystem::path& path,
               const std::pair<const char*, Value> (&names)[n]) {
    const auto text = field<std::string>(json, key, path);
    for (const auto& [name, value] : names)
        if (text == name) return value;
    throw Error(path.string(), " has ", key, " = ", to_text(json[key]),
                ", which this version does not know; restore the file");
}

DecoderSpec read_config(const Family& family, const Json& json, const std::filesystem::path& path) {
    const auto size = [&](const char* key) { return field<int64_t>(json, key, path); };
    const auto number = [&](const char* key) { return field<double>(json, key, path); };
    const Positions positions = value_of(json, "positions", path, all_positions);
    DecoderSettings settings{
        .n_layer = size("n_layer"),
        .n_head = size("n_head"),
        .n_embd = size("n_embd"),
        .n_ctx = size("n_ctx"),
        .vocab_size = size("vocab_size"),
        .n_kv_head = size("n_kv_head"),
        .head_size = size("head_size"),
        .n_ff = size("n_ff"),
        .norm = value_of(json, "norm", path, norms),
        .norm_epsilon = number("norm_epsilon"),
        .mlp = value_of(json, "mlp", path, mlps),
        .biases = value_of(json, "bias", path, all_biases),
        .qk_norm = field<bool>(json, "qk_norm", path) ? QkNormKind::head : QkNormKind::off,
        .tied_head = field<bool>(json, "tied_head", path),
        .attention_softcap = optional_field<double>(json, "attention_softcap", 0, path),
        .head_softcap = optional_field<double>(json, "head_softcap", 0, path),
        .positions = positions,
        .init_std = number("init_std")};
    if (positions == Positions::rope) {
        RopeFrequencies& rope = settings.rope_scaling;
        settings.rope_theta = number("rope_theta");
        rope.scaling = value_of(json, "rope_scaling", path, scalings);
        rope.factor = number("rope_factor");
        rope.low_frequency_factor = number("rope_low_freq_factor");
        rope.high_frequency_factor = number("rope_high_freq_factor");
        rope.original_context = size("rope_original_n_ctx");
    }
    return family.spec(settings, path.string());
}

/// The keys of a configuration (training/config/config.h).
Json config_of(const DecoderSpec& s) {
    Json json = {{"model_type", other.model_type},
                 {"vocab_size", s.vocab_size},
                 {"n_layer", s.n_layer},
                 {"n_head", s.n_head},
                 {"n_embd", s.n_embd},
                 {"n_ctx", s.n_ctx},
                 {"n_kv_head", s.n_kv_head},
                 {"head_size", s.head_size},
                 {"n_ff", s.n_ff},
                 {"norm", name_of(s.norm, norms)},
                 {"norm_epsilon", s.norm_epsilon},
                 {"mlp", name_of(s.mlp, mlps)},
                 {"bias", name_of(s.biases, all_biases)},
                 {"qk_norm", s.qk_norm != QkNormKind::off},
                 {"tied_head", s.tied_head},
                 {"attention_softcap", s.attention_softcap},
                 {"head_softcap", s.head_softcap},
                 {"positions", name_of(s.positions, all_positions)},
                 {"init_std", s.init_std}};
    if (s.is_rotary()) {
        json["rope_theta"] = s.rope.theta;
        json["rope_scaling"] = name_of(s.rope.scaling, scalings);
        json["rope_factor"] = s.rope.factor;
        json["rope_low_freq_factor"] = s.rope.low_frequency_factor;
        json["rope_high_freq_factor"] = s.rope.high_frequency_factor;
        json["rope_original_n_ctx"] = s.rope.original_context;
    }
    return json;
}

}  // namespace

const Family other{.model_type = "train_gpt",
                   .title = "train_gpt",
                   .prefix = "",
                   .defaults = [](DecoderSpec&) {},  // its files say everything
                   .holds = [](const DecoderSpec&) { return true; },
                   .registry = [](const DecoderSpec& s) { return llama_class_registry(s); },
                   .read = read_config,
                   .config = config_of,
                   .is_buffer = is_llama_class_buffer};

}  // namespace train_gpt
