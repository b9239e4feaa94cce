// Qwen 3 (Yang et al. 2025): Llama with heads of 128 whose queries and keys are normalised.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

extern const Family qwen3;

}  // namespace train_gpt
