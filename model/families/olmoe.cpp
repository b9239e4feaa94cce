#include "model/families/olmoe.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family olmoe = llama_class({.model_type = "olmoe",
                                  .title = "OLMoE",
                                  .architecture = "OlmoeForCausalLM",
                                  .qk_norm = QkNormKind::width,
                                  .experts = {.n_expert = 64, .n_expert_per_token = 8}});

}  // namespace train_gpt
