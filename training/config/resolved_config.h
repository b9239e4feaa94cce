// Configurations in which everything that the program fills in has its value: sizes, the family's
// defaults, and what is chosen for the device.
#pragma once
#include <string>
#include <vector>

#include "training/config/config.h"

namespace train_gpt {

/// The configuration with all sizes of the model, the family's defaults, the sequence length and
/// the dtype. Device, micro-batch and recompute level stay as they are given: they depend only on
/// the machine. So the result starts the same run on any machine.
Config resolve(Config config, const DecoderSpec& spec, DType dtype);

/// The configuration that a run on this machine would use. notes: sentences about what cannot be
/// resolved here.
struct ResolvedConfig {
    Config config;
    std::vector<std::string> notes;
};
/// ranks: the ranks of the run. local_ranks: the ranks that share this machine's memory.
ResolvedConfig resolve_here(const Config& given, int ranks, int local_ranks);

}  // namespace train_gpt
