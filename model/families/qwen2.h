// Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases of q, k and v.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

extern const Family qwen2;

}  // namespace train_gpt
