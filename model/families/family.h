// A family of models: how it fills a DecoderSpec, what it calls its tensors, and how Hugging Face's
// files describe it. Each family has a file beside this one and a line in family.cpp.
#pragma once
#include <filesystem>
#include <functional>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "model/families/decoder_settings.h"
#include "model/registry.h"
#include "model/spec.h"

namespace train_gpt {

struct Family {
    const char* model_type;  // in config.json, and in a configuration's model.family
    const char* title;       // in messages
    const char* prefix;      // of the names of tensors in files; files of others may lack it

    /// Sets all that the extents leave open; extents that are 0 too, except the head size where it
    /// is n_embd / n_head.
    std::function<void(DecoderSpec& spec)> defaults;
    /// Whether the family's class in transformers computes what the spec says.
    std::function<bool(const DecoderSpec& spec)> holds;
    std::function<Registry(const DecoderSpec& spec)> registry;
    /// From config.json; `family` is this one. Throws Error for a variant that computes something
    /// else with the same weights.
    std::function<DecoderSpec(const Family& family, const nlohmann::ordered_json& json,
                              const std::filesystem::path& path)>
        read;
    /// For config.json, all that depends on the spec alone.
    std::function<nlohmann::ordered_json(const DecoderSpec& spec)> config;
    /// Whether a tensor in a file, named without the prefix, holds no weights.
    std::function<bool(const std::string& name)> is_buffer;

    DecoderSpec read_config(const nlohmann::ordered_json& json,
                            const std::filesystem::path& path) const {
        return read(*this, json, path);
    }
    /// The spec of the family's model: its defaults, and what the settings say instead. Throws
    /// Error, whose message begins with `where`, for an extent that is impossible or a combination
    /// without a meaning.
    DecoderSpec spec(const DecoderSettings& settings, const std::string& where = "the model") const;
};

/// A family's model in a message: "a Llama", "an OLMoE", "a model" if only this program reads it.
std::string with_article(const Family& family);

/// The parameters of a model, as its family names them.
Registry registry_of(const DecoderSpec& spec);

/// The family with this model_type. Throws Error, which names `where`, if there is none.
const Family& family_of(const std::string& model_type, const std::string& where);

/// The family in whose files a model of this spec is kept: the spec's own, or another that holds
/// it, or `other` (other.h), whose files only this program reads.
const Family& family_for(const DecoderSpec& spec);

/// Why none of the families' classes in transformers computes what the spec says, for a message:
/// "attention_softcap = 50, mlp = relu2 outside of GPT-2". Empty if one does.
std::string beyond_transformers(const DecoderSpec& spec);

}  // namespace train_gpt
