// Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024): RMSNorm, SwiGLU, rotary positions, no
// biases, and heads that share keys and values.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

extern const Family llama;

/// What the families that follow Llama have in common.
namespace llama_class {

/// The spec of Llama, with this epsilon and θ of the rotation.
void defaults(DecoderSpec& spec, double norm_epsilon, double rope_theta);
/// Whether a spec is Llama's but for biases and the norm of heads, which must be these.
bool holds(const DecoderSpec& spec, Biases biases, bool qk_norm);
Registry registry(const DecoderSpec& spec);
/// `family` gives what a config.json may leave out.
DecoderSpec read_config(const Family& family, const nlohmann::ordered_json& json,
                        const std::filesystem::path& path);
/// `architecture`: the class in transformers.
nlohmann::ordered_json config(const DecoderSpec& spec, const char* architecture);
bool is_buffer(const std::string& name);

}  // namespace llama_class

}  // namespace train_gpt
