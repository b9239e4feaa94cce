// Qwen2-MoE.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

extern const Family qwen2_moe;

}  // namespace train_gpt
