#include "training/config/config.h"

#include "base/error.h"
#include "base/file.h"
#include "base/json_text.h"
#include "model/families/family.h"
#include "training/config/config_checks.h"
#include "training/config/config_keys.h"
#include "training/config/config_parser.h"

namespace train_gpt {

DecoderSpec spec_of(const Config& config, int64_t vocab_size) {
    const std::string where = "the model";
    const Config::Model& m = config.model;
    return family_of(m.family, where)
        .spec({.n_layer = m.n_layer,
               .n_head = m.n_head,
               .n_embd = m.n_embd,
               .n_ctx = m.n_ctx,
               .vocab_size = vocab_size,
               .n_kv_head = m.n_kv_head,
               .head_size = m.head_size,
               .n_ff = m.n_ff,
               .norm = m.norm,
               .norm_epsilon = m.norm_epsilon,
               .mlp = m.mlp,
               .biases = m.bias,
               .qk_norm = m.qk_norm,
               .tied_head = m.tied_head,
               .positions = m.positions,
               .init_std = m.init_std,
               .init_residual_scaling = m.init_residual_scaling,
               .rope_theta = m.rope_theta,
               .rope_scaling = {.scaling = m.rope_scaling,
                                .factor = m.rope_factor,
                                .low_frequency_factor = m.rope_low_freq_factor,
                                .high_frequency_factor = m.rope_high_freq_factor,
                                .original_context = m.rope_original_n_ctx}},
              where);
}

Config parse_config(const std::string& text, const std::string& name,
                    const std::vector<std::string>& overrides) {
    Config config;
    read_config(config, text, name);
    for (const std::string& override_text : overrides) apply_override(config, override_text);
    check_config(config, name);
    return config;
}

Config load_config(const std::filesystem::path& file, const std::vector<std::string>& overrides) {
    const MappedFile mapped(file);
    return parse_config(std::string(mapped.text()), file.string(), overrides);
}

std::string to_json(const Config& config) {
    Json root;
    for (const ConfigKey& key : config_keys()) {
        const std::string section(section_of_key(key.path));
        Json& parent = section.empty() ? root : root[section];
        parent[std::string(name_of_key(key.path))] = value_of(config, key);
    }
    return to_text(root, 4) + "\n";
}

std::vector<std::string> config_differences(const Config& from, const Config& to) {
    std::vector<std::string> differences;
    for (const ConfigKey& key : config_keys()) {
        const Json before = value_of(from, key), after = value_of(to, key);
        if (before != after)
            differences.push_back(
                concat(key.path, " changed from ", to_text(before), " to ", to_text(after)));
    }
    return differences;
}

std::map<std::string, std::string> config_values(const Config& config) {
    std::map<std::string, std::string> values;
    for (const ConfigKey& key : config_keys())
        values[std::string(key.path)] = to_text(value_of(config, key));
    return values;
}

}  // namespace train_gpt
