// A configuration in which everything that the program fills in has its value, also what is chosen
// for this machine.
#pragma once
#include <string>
#include <vector>

#include "training/config/config.h"

namespace train_gpt {

/// The configuration that a run on this machine would use. notes: sentences about what cannot be
/// resolved here.
struct ResolvedConfig {
    Config config;
    std::vector<std::string> notes;
};
/// ranks: the ranks of the run. local_ranks: the ranks that share this machine's memory.
ResolvedConfig resolve_here(const Config& given, int ranks, int local_ranks);

}  // namespace train_gpt
