#include "model/families/llama.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family llama = llama_class({.model_type = "llama",
                                  .title = "Llama",
                                  .architecture = "LlamaForCausalLM",
                                  .bias_key = {.key = "attention_bias"},
                                  .n_head_divides_n_embd = true,
                                  .only = R"({"mlp_bias": false})"});

}  // namespace train_gpt
