// The last losses and gradient norms in a checkpoint, from which spikes are recognised
// (kernels/spikes.h): spikes.json.
#pragma once
#include <filesystem>
#include <string>

#include "kernels/spikes.h"

namespace train_gpt {

/// Writes the file into a checkpoint's folder. Returns its name.
std::string write_spikes(const std::filesystem::path& checkpoint, const SpikeHistory& history);
/// Throws Error if the file is damaged. A checkpoint without one has an empty history.
SpikeHistory read_spikes(const std::filesystem::path& checkpoint);

}  // namespace train_gpt
