// The grids of exact sums in a checkpoint: grids.safetensors. It has the exponents of each of the
// model's tensors (kernels/exact_sums.h), I32 [parts, blocks]. A tensor that tensor-parallel ranks
// split has as many parts.
#pragma once
#include <filesystem>
#include <span>
#include <string>

#include "parallel/state/parameters.h"

namespace train_gpt {

/// Writes the grids of a store with exact sums into a checkpoint's folder: Grids::exponents(), or a
/// copy of them. Returns the file's name.
std::string write_grids(const std::filesystem::path& checkpoint, const GridLayout& layout,
                        std::span<const int32_t> exponents);

/// Sets a store's grids to a checkpoint's grids. Returns false, and changes nothing, if the
/// checkpoint has none, or grids of another number of tensor-parallel ranks. Throws Error if the
/// file is damaged.
bool read_grids(const std::filesystem::path& checkpoint, Stream& stream, Grids& grids);

}  // namespace train_gpt
