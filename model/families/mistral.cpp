#include "model/families/mistral.h"

#include "base/error.h"
#include "base/json_file.h"
#include "model/families/llama_class.h"

namespace train_gpt {

namespace {

void refuse_window(const Json& json, const std::filesystem::path& path) {
    // Where the key is missing, transformers takes its class's default.
    const Json window = json.value("sliding_window", Json(4096));
    if (!window.is_null())
        throw Error(path.string(), " has sliding_window = ", to_text(window),
                    json.contains("sliding_window") ? "" : ", the default of its class",
                    "; sliding windows are not supported, only null");
}

}  // namespace

const Family mistral = llama_class({.model_type = "mistral",
                                    .title = "Mistral",
                                    .architecture = "MistralForCausalLM",
                                    .constants = R"({"sliding_window": null})",
                                    .check = refuse_window});

}  // namespace train_gpt
