// The largest magnitudes of fp8 operands in a checkpoint's last steps, from which the next scales
// follow: fp8.safetensors, with a tensor F32 [steps] for each operand, oldest step first.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "model/fp8_scales.h"

namespace train_gpt {

/// Writes the history into a checkpoint's folder. Returns the file's name.
std::string write_fp8(const std::filesystem::path& checkpoint, const Fp8History& history);

/// Continues with the history of a checkpoint. Returns the operands of which the checkpoint has no
/// magnitudes, none with current scaling; their history begins anew, with magnitudes of 0. Throws
/// Error if the file is damaged.
std::vector<std::string> read_fp8(const std::filesystem::path& checkpoint, Fp8Scales& scales);

}  // namespace train_gpt
