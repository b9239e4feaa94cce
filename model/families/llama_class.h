// What the families that follow Llama have in common: RMSNorm, SwiGLU, rotary positions, heads that
// share keys and values, and the names of tensors and of keys in config.json.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

/// Where such a family differs from the others.
struct LlamaClass {
    const char *model_type, *title, *architecture;  // the class in transformers
    double norm_epsilon = 1e-5, rope_theta = 10000;
    Biases biases = Biases::none;
    QkNormKind qk_norm = QkNormKind::off;
    int head_size = 0;                   // 0: n_embd / n_head
    bool n_head_divides_n_embd = false;  // transformers refuses other widths, whatever head_dim is
    /// A mixture: what its models have if nothing else is said, and the names of tensors.
    ExpertSpec experts = {};
    ExpertNames expert_names = {};
    /// gpt-oss: sinks, clamped SwiGLU, and a window in every other layer.
    bool is_gpt_oss = false;
    /// For keys of config.json that all its models have the same value of: a JSON object.
    const char* constants = "{}";
    /// Throws Error for what only this family's config.json can have.
    void (*check)(const nlohmann::ordered_json& json, const std::filesystem::path& path) = nullptr;
};

Family llama_class(const LlamaClass& of);

/// The names of tensors.
Registry llama_class_registry(const DecoderSpec& spec, const ExpertNames& experts = {});
/// Frequencies, which older versions of transformers saved.
bool is_llama_class_buffer(const std::string& name);

}  // namespace train_gpt
