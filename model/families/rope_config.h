// The rotation of a model in its config.json. transformers 4 writes rope_theta and rope_scaling, 5
// writes rope_parameters and reads both.
#pragma once
#include <filesystem>

#include "base/json_file.h"
#include "model/families/decoder_settings.h"

namespace train_gpt {

/// Sets θ and the scaling to what transformers computes with a config.json of either version. Files
/// without θ mean default_theta. Throws Error where entries contradict each other, so that versions
/// differ or an entry is without effect.
void read_rope(const Json& json, const std::filesystem::path& path, DecoderSettings& settings,
               double default_theta = 10000);

/// Adds the rotation to a config.json, once for each version.
void write_rope(const DecoderSpec& spec, Json& json);

}  // namespace train_gpt
