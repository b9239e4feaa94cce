// Whether two models are of the same shape and kind.
#pragma once
#include <filesystem>

#include "model/spec.h"

namespace train_gpt {

/// Throws Error, which names the difference, if a folder's model is not the wanted model.
void require_same_model(const std::filesystem::path& directory, const DecoderSpec& found,
                        const DecoderSpec& wanted);

}  // namespace train_gpt
