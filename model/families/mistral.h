// Mistral (Jiang et al. 2023) without its sliding window: Llama under another name.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

extern const Family mistral;

}  // namespace train_gpt
