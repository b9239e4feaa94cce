// A family of models: how it fills a DecoderSpec, what it calls its tensors, and how Hugging Face's
// files describe it. Each family has a file beside this one and a line in family.cpp.
#pragma once
#include <filesystem>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "model/registry.h"
#include "model/spec.h"

namespace train_gpt {

struct Family {
    const char* model_type;  // in config.json
    const char* title;       // in messages
    const char* prefix;      // of the names of tensors in files; files of others may lack it

    DecoderSpec (*spec)(const DecoderSize& size);
    Registry (*registry)(const DecoderSpec& spec);
    /// From config.json. Throws Error for a variant that computes something else with the same
    /// weights.
    DecoderSpec (*read_config)(const nlohmann::ordered_json& json,
                               const std::filesystem::path& path);
    /// For config.json, all that depends on the spec alone.
    nlohmann::ordered_json (*config)(const DecoderSpec& spec);
    /// Whether a tensor in a file, named without the prefix, holds no weights.
    bool (*is_buffer)(const std::string& name);
};

/// The family with this model_type. Throws Error, which names `path`, if there is none.
const Family& family_of(const std::string& model_type, const std::filesystem::path& path);

/// The family of models that a configuration describes.
const Family& default_family();

}  // namespace train_gpt
