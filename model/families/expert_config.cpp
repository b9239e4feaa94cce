#include "model/families/expert_config.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "model/families/config_file.h"

namespace train_gpt {

namespace {

constexpr const char* count_keys[] = {"num_experts", "num_local_experts"};

int64_t read_count(const ExpertKeys& keys, const Json& json, const std::filesystem::path& path) {
    const ConfigFile file(json, path);
    const int64_t a = file.optional_size(count_keys[0]), b = file.optional_size(count_keys[1]);
    if (a > 0 && b > 0 && a != b)
        throw Error(path.string(), " has ", count_keys[0], " = ", a, ", but ", count_keys[1], " = ",
                    b, "; versions of transformers take one or the other, so remove one");
    return a > 0 ? a : b > 0 ? b : file.size(keys.n_expert);
}

std::vector<int> read_layers(const char* key, const Json& json, const std::filesystem::path& path) {
    std::vector<int> layers;
    const Json list = optional_field(json, key, Json::array(), path);
    const auto is_layer = [](const Json& layer) { return layer.is_number_integer(); };
    if (!list.is_array() || !std::ranges::all_of(list, is_layer))
        throw Error(path.string(), " has ", key, " = ", to_text(list),
                    "; it must be a list of layers, counted from 0");
    for (const Json& layer : list) layers.push_back(layer.get<int>());
    return layers;
}

}  // namespace

void read_experts(const ExpertSpec& family, const ExpertKeys& keys, const Json& json,
                  const std::filesystem::path& path, DecoderSettings& settings) {
    const ConfigFile file(json, path);
    if (!family) {
        for (const char* key : count_keys)
            if (file.has(key))
                throw Error(path.string(), " has ", key, " = ", to_text(json[key]),
                            ", but models of its model_type have no experts; correct model_type");
        return;
    }
    settings.n_expert = read_count(keys, json, path);
    settings.n_expert_per_token = file.size("num_experts_per_tok");
    settings.n_ff_expert =
        file.size(keys.dense_layers ? "moe_intermediate_size" : "intermediate_size");
    if (family.shared_gate)
        settings.n_ff_shared = static_cast<int>(file.size("shared_expert_intermediate_size"));
    if (keys.norm_topk_prob) settings.router_normalise = file.flag("norm_topk_prob", false);
    if (!keys.dense_layers) return;
    if (file.has("decoder_sparse_step"))
        settings.experts_every = static_cast<int>(file.size("decoder_sparse_step"));
    settings.dense_layers = read_layers("mlp_only_layers", json, path);
}

void write_experts(const ExpertKeys& keys, const DecoderSpec& spec, Json& json) {
    const ExpertSpec& e = spec.experts;
    if (!e) return;
    json[keys.n_expert] = e.n_expert;
    json["num_experts_per_tok"] = e.n_expert_per_token;
    if (e.shared_gate) json["shared_expert_intermediate_size"] = e.n_ff_shared;
    if (keys.norm_topk_prob) json["norm_topk_prob"] = e.rule.normalise;
    if (!keys.dense_layers) return;
    json["moe_intermediate_size"] = e.n_ff;
    json["decoder_sparse_step"] = spec.experts_every;
    json["mlp_only_layers"] = spec.dense_layers;
}

bool holds_experts(const ExpertSpec& family, const ExpertKeys& keys, const DecoderSpec& spec) {
    const ExpertSpec& e = spec.experts;
    if (!e || !family) return !e && !family;
    ExpertSpec same = e;
    same.n_expert = family.n_expert, same.n_expert_per_token = family.n_expert_per_token;
    same.n_ff = family.n_ff, same.n_ff_shared = family.n_ff_shared;
    same.capacity = family.capacity;
    if (keys.norm_topk_prob) same.rule.normalise = family.rule.normalise;
    const bool all_layers = spec.experts_every == 1 && spec.dense_layers.empty();
    return same == family && (e.n_ff_shared > 0) == family.shared_gate &&
           (all_layers || keys.dense_layers);
}

void refuse_unsupported_parts(const Json& json, const std::filesystem::path& path) {
    const ConfigFile file(json, path);
    const auto refuse = [&](const char* key, const auto&... why) {
        throw Error(path.string(), " has ", key, " = ", to_text(json[key]), why...);
    };
    if (file.has("quantization_config"))
        refuse("quantization_config",
               "; weights must be fp32, bf16 or fp16: load the model in transformers dequantized "
               "(for MXFP4 with quantization_config=Mxfp4Config(dequantize=True)) and save it");
    for (const char* key : {"kv_lora_rank", "q_lora_rank"})
        if (file.has(key))
            refuse(key,
                   "; multi-head latent attention (MLA) is not supported, only attention "
                   "with queries, keys and values of their own");
    for (const char* key : {"n_group", "num_expert_group"})
        if (file.has(key) && json[key] != 1)
            refuse(key, "; routers that choose groups of experts first are not supported, only 1");
}

}  // namespace train_gpt
