// Qwen3-MoE.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

extern const Family qwen3_moe;

}  // namespace train_gpt
