// Decoders that no class in transformers computes, such as one with LayerNorm and rotary positions.
// Their checkpoints have Llama's names of tensors and a config.json that only this program reads.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

extern const Family other;

}  // namespace train_gpt
