#include "training/files/kept_choices.h"

#include <limits>
#include <sstream>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "base/json_text.h"
#include "training/config/config.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view choices_name = "choices.json";

}  // namespace

Choices choices_from_json(const std::string& text, const std::string& origin) {
    const Json json = try_parse_json(text);
    Choices choices;
    const auto damaged = [&] { return Error(origin, " is damaged; remove it to choose again"); };
    if (!json.is_object() || !json.contains("recompute") || !json["recompute"].is_string() ||
        !json.contains("kernels") || !json["kernels"].is_array())
        throw damaged();
    if (json.contains("micro_batch")) {  // older checkpoints have none
        if (!json["micro_batch"].is_number_unsigned() ||
            json["micro_batch"] > std::numeric_limits<int>::max())
            throw damaged();
        choices.micro_batch = json["micro_batch"].get<int>();
    }
    choices.recompute = json["recompute"].get<std::string>();
    if (json.contains("zero")) {  // older checkpoints have none
        if (!json["zero"].is_number_unsigned() || json["zero"] > 3) throw damaged();
        choices.zero = json["zero"].get<int>();
    }
    if (json.contains("sums")) {  // older checkpoints have none
        OneOf<std::optional<GradientSums>> sums;
        if (!json["sums"].is_string() || !sums.parse(json["sums"].get<std::string>()))
            throw damaged();
        choices.sums = sums;
    }
    if (json.contains("offload")) {  // older checkpoints have none
        if (!json["offload"].is_array() || json["offload"].empty()) throw damaged();
        for (const Json& word : json["offload"]) {
            if (word != "none" && word != "optimizer" && word != "activations") throw damaged();
            choices.offload.push_back(word.get<std::string>());
        }
    }
    if (json.contains("threads")) {  // older checkpoints have none
        if (!json["threads"].is_number_unsigned() ||
            json["threads"] > std::numeric_limits<int>::max())
            throw damaged();
        choices.threads = json["threads"].get<int>();
    }
    if (json.contains("platform")) {  // older checkpoints have none
        if (!json["platform"].is_string()) throw damaged();
        choices.platform = json["platform"].get<std::string>();
    }
    for (const Json& line : json["kernels"]) {
        if (!line.is_string()) throw damaged();
        choices.kernels += line.get<std::string>() + "\n";
    }
    return choices;
}

std::string to_json(const Choices& choices) {
    Json json = {{"micro_batch", choices.micro_batch},
                 {"recompute", choices.recompute},
                 {"platform", choices.platform},
                 {"kernels", Json::array()}};
    if (choices.zero) json["zero"] = *choices.zero;
    if (!choices.offload.empty()) json["offload"] = choices.offload;
    if (choices.threads > 0) json["threads"] = choices.threads;
    if (choices.sums) json["sums"] = OneOf<std::optional<GradientSums>>(choices.sums).word();
    std::istringstream lines(choices.kernels);
    for (std::string line; std::getline(lines, line);) json["kernels"].push_back(line);
    return to_text(json, 2) + "\n";
}

Choices read_choices(const fs::path& folder) {
    const fs::path path = folder / choices_name;
    if (!fs::exists(path)) return {};
    return choices_from_json(std::string(MappedFile(path).text()), path.string());
}

Choices given_choices(const fs::path& folder) {
    if (!fs::exists(folder / choices_name))
        throw Error(folder.string(), " has no ", choices_name,
                    "; name the folder of a run that has started, or of a checkpoint");
    Choices choices = read_choices(folder);
    if (!choices.sums) choices.sums = GradientSums::fp32;  // an earlier version's
    return choices;
}

void write_choices(const fs::path& folder, const Choices& choices) {
    write_file(folder / choices_name, to_json(choices));
}

}  // namespace train_gpt
