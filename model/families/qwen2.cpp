#include "model/families/qwen2.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family qwen2 = llama_class(
    {.model_type = "qwen2",
     .title = "Qwen2",
     .architecture = "Qwen2ForCausalLM",
     .norm_epsilon = 1e-6,
     .rope_theta = 1e6,
     .biases = Biases::qkv,
     .windows = {.layers = WindowKeys::Layers::later, .use_key = true, .fallback = 4096}});

}  // namespace train_gpt
