#include "model/families/qwen3.h"

#include "base/json_file.h"
#include "model/families/llama.h"

namespace train_gpt {

const Family qwen3{
    .model_type = "qwen3",
    .title = "Qwen3",
    .prefix = "",
    .defaults =
        [](DecoderSpec& spec) {
            if (spec.head_size == 0) spec.head_size = 128;
            llama_class::defaults(spec, 1e-6, 1e6);
            spec.qk_norm = true;
        },
    .holds = [](const DecoderSpec& spec) { return llama_class::holds(spec, Biases::none, true); },
    .registry = llama_class::registry,
    .read_config =
        [](const Json& json, const std::filesystem::path& path) {
            return llama_class::read_config(qwen3, json, path);
        },
    .config =
        [](const DecoderSpec& spec) {
            Json json = llama_class::config(spec, "Qwen3ForCausalLM");
            json["use_sliding_window"] = false;
            return json;
        },
    .is_buffer = llama_class::is_buffer};

}  // namespace train_gpt
