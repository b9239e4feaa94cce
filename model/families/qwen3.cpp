#include "model/families/qwen3.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family qwen3 = llama_class(
    {.model_type = "qwen3",
     .title = "Qwen3",
     .architecture = "Qwen3ForCausalLM",
     .norm_epsilon = 1e-6,
     .rope_theta = 1e6,
     .bias_key = {.key = "attention_bias"},
     .qk_norm = QkNormKind::head,
     .head_size = 128,
     .file = {.head_size = 128},
     .windows = {.layers = WindowKeys::Layers::later, .use_key = true, .fallback = 4096}});

}  // namespace train_gpt
