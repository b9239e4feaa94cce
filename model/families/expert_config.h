// Mixtures of experts in a config.json of Hugging Face's: num_experts or num_local_experts,
// num_experts_per_tok, moe_intermediate_size, decoder_sparse_step, mlp_only_layers, ….
#pragma once
#include <filesystem>

#include "base/json_text.h"
#include "model/families/decoder_settings.h"

namespace train_gpt {

/// Which of these keys a family's class in transformers has. n_expert: the key in published files;
/// num_experts and num_local_experts are both read.
struct ExpertKeys {
    const char* n_expert = "num_experts";
    /// decoder_sparse_step and mlp_only_layers say which layers have an MLP of intermediate_size;
    /// experts have moe_intermediate_size. If not, all layers have experts, of intermediate_size.
    bool dense_layers = false;
    bool norm_topk_prob = false;  // whether the weights of a token's experts are normalised
};

/// Sets what config.json says of experts. `family`: the experts of the family's models; none: files
/// with experts are refused. Throws Error, which names file and key.
void read_experts(const ExpertSpec& family, const ExpertKeys& keys, const Json& json,
                  const std::filesystem::path& path, DecoderSettings& settings);

/// Adds the keys to a config.json.
void write_experts(const ExpertKeys& keys, const DecoderSpec& spec, Json& json);

/// Whether experts differ from the family's in nothing but what its keys say.
bool holds_experts(const ExpertSpec& family, const ExpertKeys& keys, const DecoderSpec& spec);

/// Throws Error, which names file and key, for a model whose attention or router no family here
/// has: latent attention (MLA), routers that choose groups of experts, weights that are quantized.
void refuse_unsupported_parts(const Json& json, const std::filesystem::path& path);

}  // namespace train_gpt
