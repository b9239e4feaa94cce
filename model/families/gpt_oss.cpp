#include "model/families/gpt_oss.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family gpt_oss = llama_class({.model_type = "gpt_oss",
                                    .title = "gpt-oss",
                                    .architecture = "GptOssForCausalLM",
                                    .rope_theta = 150000,
                                    .biases = Biases::attention,
                                    .head_size = 64,
                                    .experts = {.n_expert = 32,
                                                .n_expert_per_token = 4,
                                                .rule = {.normalise = true},
                                                .router_bias = true,
                                                .biases = true},
                                    .expert_names = {.router = "mlp.router", .fused = true},
                                    .is_gpt_oss = true});

}  // namespace train_gpt
