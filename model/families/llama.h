// Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024): RMSNorm, SwiGLU, rotary positions,
// no biases, and heads that share keys and values.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

extern const Family llama;

}  // namespace train_gpt
