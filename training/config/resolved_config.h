// A configuration in which sizes and the family's defaults have their values.
#pragma once
#include "training/config/config.h"

namespace train_gpt {

/// The configuration with all sizes of the model, the family's defaults, the sequence length and
/// the dtype. Device, micro-batch and recompute level stay as they are given: they depend only on
/// the machine. So the result starts the same run on any machine.
Config resolve(Config config, const DecoderSpec& spec, DType dtype);

}  // namespace train_gpt
