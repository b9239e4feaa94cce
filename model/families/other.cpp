#include "model/families/other.h"

#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/json_file.h"
#include "model/families/config_file.h"
#include "model/families/llama_class.h"

namespace train_gpt {

namespace {

constexpr std::pair<const char*, Norm> norms[] = {{"layernorm", Norm::layer},
                                                  {"rmsnorm", Norm::rms}};
constexpr std::pair<const char*, Mlp> mlps[] = {
    {"gelu", Mlp::gelu}, {"swiglu", Mlp::swiglu}, {"relu2", Mlp::relu2}};
constexpr std::pair<const char*, Biases> all_biases[] = {{"none", Biases::none},
                                                         {"qkv", Biases::qkv},
                                                         {"attention", Biases::attention},
                                                         {"all", Biases::all}};
constexpr std::pair<const char*, QkNormKind> qk_norms[] = {
    {"off", QkNormKind::off}, {"head", QkNormKind::head}, {"width", QkNormKind::width}};
constexpr std::pair<const char*, RouterScore> routers[] = {{"softmax", RouterScore::softmax},
                                                           {"sigmoid", RouterScore::sigmoid}};
constexpr std::pair<const char*, Positions> all_positions[] = {{"learned", Positions::learned},
                                                               {"rope", Positions::rope}};
constexpr std::pair<const char*, RopeScaling> scalings[] = {{"none", RopeScaling::none},
                                                            {"linear", RopeScaling::linear},
                                                            {"llama3", RopeScaling::llama3},
                                                            {"yarn", RopeScaling::yarn}};

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

/// Older files say whether each head has a norm.
QkNormKind read_qk_norm(const Json& json, const std::filesystem::path& path) {
    if (json.contains("qk_norm") && json["qk_norm"].is_boolean())
        return json["qk_norm"] == true ? QkNormKind::head : QkNormKind::off;
    return value_of(json, "qk_norm", path, qk_norms);
}

/// What older files do not have.
void read_windows(const Json& json, const std::filesystem::path& path, DecoderSettings& settings) {
    settings.window = optional_field(json, "window", 0, path);
    settings.window_pattern = optional_field<std::string>(json, "window_pattern", "", path);
    settings.sinks = optional_field(json, "sinks", false, path);
    settings.clamped_swiglu = json.contains("swiglu_limit");
    if (!*settings.clamped_swiglu) return;
    settings.clamped = {field<float>(json, "swiglu_alpha", path),
                        field<float>(json, "swiglu_limit", path)};
}

void read_experts(const Json& json, const std::filesystem::path& path, DecoderSettings& settings) {
    settings.n_expert = optional_field<int64_t>(json, "n_expert", 0, path);
    if (settings.n_expert == 0) return;
    settings.n_expert_per_token = field<int64_t>(json, "n_expert_per_token", path);
    settings.n_ff_expert = field<int64_t>(json, "n_ff_expert", path);
    settings.n_ff_shared = field<int>(json, "n_ff_shared", path);
    settings.shared_gate = field<bool>(json, "shared_gate", path);
    settings.router = value_of(json, "router", path, routers);
    settings.router_normalise = field<bool>(json, "router_normalise", path);
    settings.router_scale = field<double>(json, "router_scale", path);
    settings.router_bias = field<bool>(json, "router_bias", path);
    settings.expert_bias = field<bool>(json, "expert_bias", path);
    settings.selection_bias = field<bool>(json, "selection_bias", path);
    settings.dense_layers = field<std::vector<int>>(json, "dense_layers", path);
    settings.experts_every = field<int>(json, "experts_every", path);
}

DecoderSpec read_other(const Family& family, const Json& json, const std::filesystem::path& path) {
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
        .qk_norm = read_qk_norm(json, path),
        .tied_head = field<bool>(json, "tied_head", path),
        .attention_softcap = optional_field<double>(json, "attention_softcap", 0, path),
        .head_softcap = optional_field<double>(json, "head_softcap", 0, path),
        .positions = positions,
        .init_std = number("init_std")};
    read_windows(json, path, settings);
    read_experts(json, path, settings);
    if (positions == Positions::rope) {
        RopeFrequencies& rope = settings.rope_scaling;
        settings.rope_theta = number("rope_theta");
        rope.scaling = value_of(json, "rope_scaling", path, scalings);
        rope.factor = number("rope_factor");
        rope.low_frequency_factor = number("rope_low_freq_factor");
        rope.high_frequency_factor = number("rope_high_freq_factor");
        rope.original_context = size("rope_original_n_ctx");
        if (rope.scaling == RopeScaling::yarn)
            rope.yarn = {.beta_fast = number("rope_beta_fast"),
                         .beta_slow = number("rope_beta_slow"),
                         .truncate = field<bool>(json, "rope_truncate", path),
                         .attention_factor = number("rope_attention_factor"),
                         .mscale = number("rope_mscale"),
                         .mscale_all_dim = number("rope_mscale_all_dim")};
    }
    return family.spec(settings, path.string());
}

/// The keys of a configuration (training/config/config.h).
Json other_config(const DecoderSpec& s) {
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
                 {"qk_norm", name_of(s.qk_norm, qk_norms)},
                 {"tied_head", s.tied_head},
                 {"attention_softcap", s.attention_softcap},
                 {"head_softcap", s.head_softcap},
                 {"positions", name_of(s.positions, all_positions)},
                 {"init_std", s.init_std}};
    if (s.window > 0) json["window"] = s.window, json["window_pattern"] = s.window_pattern;
    if (s.sinks) json["sinks"] = true;
    if (s.clamped) {
        json["swiglu_alpha"] = as_written(s.clamped->alpha);
        json["swiglu_limit"] = as_written(s.clamped->limit);
    }
    if (const ExpertSpec& e = s.experts)
        json.update({{"n_expert", e.n_expert},
                     {"n_expert_per_token", e.n_expert_per_token},
                     {"n_ff_expert", e.n_ff},
                     {"n_ff_shared", e.n_ff_shared},
                     {"shared_gate", e.shared_gate},
                     {"router", name_of(e.rule.score, routers)},
                     {"router_normalise", e.rule.normalise},
                     {"router_scale", as_written(e.rule.scale)},
                     {"router_bias", e.router_bias},
                     {"expert_bias", e.biases},
                     {"selection_bias", e.selection_bias},
                     {"dense_layers", s.dense_layers},
                     {"experts_every", s.experts_every}});
    if (s.is_rotary()) {
        json["rope_theta"] = s.rope.theta;
        json["rope_scaling"] = name_of(s.rope.scaling, scalings);
        json["rope_factor"] = s.rope.factor;
        json["rope_low_freq_factor"] = s.rope.low_frequency_factor;
        json["rope_high_freq_factor"] = s.rope.high_frequency_factor;
        json["rope_original_n_ctx"] = s.rope.original_context;
        if (s.rope.scaling == RopeScaling::yarn)
            json.update({{"rope_beta_fast", s.rope.yarn.beta_fast},
                         {"rope_beta_slow", s.rope.yarn.beta_slow},
                         {"rope_truncate", s.rope.yarn.truncate},
                         {"rope_attention_factor", s.rope.yarn.attention_factor},
                         {"rope_mscale", s.rope.yarn.mscale},
                         {"rope_mscale_all_dim", s.rope.yarn.mscale_all_dim}});
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
                   .read = read_other,
                   .config = other_config,
                   .is_buffer = is_llama_class_buffer};

}  // namespace train_gpt
