#include "model/families/mistral.h"

#include "base/error.h"
#include "base/json_file.h"
#include "model/families/llama.h"

namespace train_gpt {

const Family mistral{
    .model_type = "mistral",
    .title = "Mistral",
    .prefix = "",
    .defaults = [](DecoderSpec& spec) { llama_class::defaults(spec, 1e-5, 10000); },
    .holds = [](const DecoderSpec& spec) { return llama_class::holds(spec, Biases::none, false); },
    .registry = llama_class::registry,
    .read_config =
        [](const Json& json, const std::filesystem::path& path) {
            // Where the key is missing, transformers takes its class's default.
            const Json window = json.value("sliding_window", Json(4096));
            if (!window.is_null())
                throw Error(path.string(), " has sliding_window = ", to_text(window),
                            json.contains("sliding_window") ? "" : ", the default of its class",
                            "; sliding windows are not supported, only null");
            return llama_class::read_config(mistral, json, path);
        },
    .config =
        [](const DecoderSpec& spec) {
            Json json = llama_class::config(spec, "MistralForCausalLM");
            json["sliding_window"] = nullptr;
            return json;
        },
    .is_buffer = llama_class::is_buffer};

}  // namespace train_gpt
