#include "model/families/qwen3.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family qwen3 = llama_class({.model_type = "qwen3",
                                  .title = "Qwen3",
                                  .architecture = "Qwen3ForCausalLM",
                                  .norm_epsilon = 1e-6,
                                  .rope_theta = 1e6,
                                  .qk_norm = QkNormKind::head,
                                  .head_size = 128,
                                  .constants = R"({"use_sliding_window": false})"});

}  // namespace train_gpt
