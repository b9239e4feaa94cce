// GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each half of a block, tanh-GELU,
// biases everywhere, and a head that is the token embedding.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

extern const Family gpt2;

}  // namespace train_gpt
