#include "model/families/olmoe.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family olmoe =
    llama_class({.model_type = "olmoe",
                 .title = "OLMoE",
                 .architecture = "OlmoeForCausalLM",
                 .bias_key = {.key = "attention_bias"},
                 .qk_norm = QkNormKind::width,
                 .heads_fill_n_embd = true,
                 .file = {.norm_epsilon = 1e-5},
                 .experts = {.n_expert = 64, .n_expert_per_token = 8},
                 .expert_keys = {.norm_topk_prob = true},
                 .constants = R"({"output_router_logits": false, "router_aux_loss_coef": 0.01})",
                 .only = R"({"clip_qkv": null})"});

}  // namespace train_gpt
