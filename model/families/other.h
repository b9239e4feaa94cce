// Decoders that no class in transformers computes, such as one with LayerNorm and rotary positions.
// Their checkpoints have Llama's names of tensors and a config.json that only this program reads.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

extern const Family other;

/// Why no class in transformers computes what the spec says, for a message: "attention_softcap = 50,
/// mlp = relu2". Empty if one does.
std::string beyond_transformers(const DecoderSpec& spec);

}  // namespace train_gpt
