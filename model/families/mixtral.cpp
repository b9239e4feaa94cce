#include "model/families/mixtral.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family mixtral =
    llama_class({.model_type = "mixtral",
                 .title = "Mixtral",
                 .architecture = "MixtralForCausalLM",
                 .rope_theta = 1e6,
                 .file = {.rope_theta = 1e6, .norm_epsilon = 1e-5},
                 .windows = {.layers = WindowKeys::Layers::all},
                 .experts = {.n_expert = 8, .n_expert_per_token = 2, .rule = {.normalise = true}},
                 .expert_keys = {.n_expert = "num_local_experts"},
                 .expert_names = {.router = "block_sparse_moe.gate",
                                  .router_in_memory = "mlp.gate",
                                  .expert = "block_sparse_moe.experts.",
                                  .gate = "w1",
                                  .up = "w3",
                                  .down = "w2"},
                 .constants = R"({"output_router_logits": false, "router_aux_loss_coef": 0.001})",
                 .only = R"({"router_jitter_noise": 0.0})"});

}  // namespace train_gpt
