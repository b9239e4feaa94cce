#include "model/families/qwen3_moe.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family qwen3_moe =
    llama_class({.model_type = "qwen3_moe",
                 .title = "Qwen3-MoE",
                 .architecture = "Qwen3MoeForCausalLM",
                 .norm_epsilon = 1e-6,
                 .rope_theta = 1e6,
                 .bias_key = {.key = "attention_bias"},
                 .qk_norm = QkNormKind::head,
                 .head_size = 128,
                 .windows = {.layers = WindowKeys::Layers::all, .use_key = true, .fallback = 4096},
                 .experts = {.n_expert = 128, .n_expert_per_token = 8, .rule = {.normalise = true}},
                 .expert_keys = {.dense_layers = true, .norm_topk_prob = true},
                 .constants = R"({"output_router_logits": false, "router_aux_loss_coef": 0.001})"});

}  // namespace train_gpt
