#include "model/families/mistral.h"

#include "model/families/llama_class.h"

namespace train_gpt {

const Family mistral =
    llama_class({.model_type = "mistral",
                 .title = "Mistral",
                 .architecture = "MistralForCausalLM",
                 .windows = {.layers = WindowKeys::Layers::all, .fallback = 4096}});

}  // namespace train_gpt
