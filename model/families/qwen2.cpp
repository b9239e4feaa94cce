#include "model/families/qwen2.h"

#include "base/json_file.h"
#include "model/families/llama.h"

namespace train_gpt {

const Family qwen2{
    .model_type = "qwen2",
    .title = "Qwen2",
    .prefix = "",
    .defaults =
        [](DecoderSpec& spec) {
            llama_class::defaults(spec, 1e-6, 1e6);
            spec.biases = Biases::qkv;
        },
    .holds = [](const DecoderSpec& spec) { return llama_class::holds(spec, Biases::qkv, false); },
    .registry = llama_class::registry,
    .read_config =
        [](const Json& json, const std::filesystem::path& path) {
            return llama_class::read_config(qwen2, json, path);
        },
    .config =
        [](const DecoderSpec& spec) {
            Json json = llama_class::config(spec, "Qwen2ForCausalLM");
            json["use_sliding_window"] = false;
            return json;
        },
    .is_buffer = llama_class::is_buffer};

}  // namespace train_gpt
