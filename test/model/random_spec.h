// Decoders of all kinds, for tests.
#pragma once
#include <array>
#include <string>

#include "base/error.h"
#include "model/families/gpt2.h"
#include "model/spec.h"
#include "test/random.h"

namespace train_gpt {

/// Experts of all kinds in some of the layers. Each tensor-parallel rank has an equal part of them.
DecoderSettings with_experts(DecoderSettings s, int tensor_ranks = 1);

/// A capacity of experts that drops much, little or nothing.
double random_capacity();

/// A decoder with whatever a family may have: grouped heads of any size, any norm, MLP, biases,
/// head and positions.
DecoderSpec random_spec(int least_layers = 1);

std::string described(const DecoderSpec& spec);

}  // namespace train_gpt
