// Configurations in which what the program fills in has its value: sizes, the family's defaults,
// and what is chosen for the device.
#pragma once
#include <string>
#include <vector>

#include "training/config/config.h"

namespace train_gpt {

/// The configuration with all sizes of the model, the family's defaults, the sequence length and
/// the dtype. What depends on the machine alone stays as it is given, so that the result starts the
/// same run anywhere: the device, the micro-batch and the recompute level.
Config resolve(Config config, const DecoderSpec& spec, DType dtype);

/// What a run on this machine resolves: everything that it would use. notes: sentences about what
/// cannot be resolved here.
struct ResolvedConfig {
    Config config;
    std::vector<std::string> notes;
};
/// ranks: of the run; local_ranks: those among which this machine's memory is shared.
ResolvedConfig resolve_here(const Config& given, int ranks, int local_ranks);

}  // namespace train_gpt
