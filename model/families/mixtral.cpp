#include "model/families/mixtral.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family mixtral =
    llama_class({.model_type = "mixtral",
                 .title = "Mixtral",
                 .architecture = "MixtralForCausalLM",
                 .rope_theta = 1e6,
                 .experts = {.n_expert = 8, .n_expert_per_token = 2, .rule = {.normalise = true}},
                 .expert_names = {.router = "block_sparse_moe.gate",
                                  .expert = "block_sparse_moe.experts.",
                                  .gate = "w1",
                                  .up = "w3",
                                  .down = "w2"}});

}  // namespace train_gpt
