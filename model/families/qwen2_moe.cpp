#include "model/families/qwen2_moe.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family qwen2_moe = llama_class(
    {.model_type = "qwen2_moe",
     .title = "Qwen2-MoE",
     .architecture = "Qwen2MoeForCausalLM",
     .norm_epsilon = 1e-6,
     .rope_theta = 1e6,
     .biases = Biases::qkv,
     .bias_key = {.key = "qkv_bias", .if_true = Biases::qkv, .fallback = true},
     .windows = {.layers = WindowKeys::Layers::listed, .use_key = true, .fallback = 4096},
     .experts = {.n_expert = 60, .n_expert_per_token = 4, .shared_gate = true},
     .expert_keys = {.dense_layers = true, .norm_topk_prob = true},
     .constants = R"({"output_router_logits": false, "router_aux_loss_coef": 0.001})"});

}  // namespace train_gpt
