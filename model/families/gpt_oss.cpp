#include "model/families/gpt_oss.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family gpt_oss =
    llama_class({.model_type = "gpt_oss",
                 .title = "gpt-oss",
                 .architecture = "GptOssForCausalLM",
                 .rope_theta = 150000,
                 .biases = Biases::attention,
                 .bias_key = {.key = "attention_bias", .fallback = true},
                 .head_size = 64,
                 .file = {.rope_theta = 150000, .norm_epsilon = 1e-5, .head_size = 64},
                 .windows = {.layers = WindowKeys::Layers::other, .fallback = 128},
                 .experts = {.n_expert = 32,
                             .n_expert_per_token = 4,
                             .rule = {.normalise = true},
                             .router_bias = true,
                             .biases = true},
                 .expert_keys = {.n_expert = "num_local_experts"},
                 .expert_names = {.router = "mlp.router", .only_stacked = true},
                 .sinks = true,
                 .clamped = true,
                 .window = 128,
                 .yarn = true,
                 .constants = R"({"output_router_logits": false, "router_aux_loss_coef": 0.001})"});

}  // namespace train_gpt
