#include "model/families/qwen2_moe.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family qwen2_moe =
    llama_class({.model_type = "qwen2_moe",
                 .title = "Qwen2-MoE",
                 .architecture = "Qwen2MoeForCausalLM",
                 .norm_epsilon = 1e-6,
                 .rope_theta = 1e6,
                 .biases = Biases::qkv,
                 .experts = {.n_expert = 60, .n_expert_per_token = 4, .shared_gate = true}});

}  // namespace train_gpt
