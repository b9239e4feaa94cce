#include "training/choices.h"

#include <sstream>
#include <string_view>

#include <nlohmann/json.hpp>

#include "kernels/error.h"
#include "kernels/file.h"

namespace train_gpt {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

namespace {

constexpr std::string_view file_name = "choices.json";

}  // namespace

Choices read_choices(const fs::path& folder) {
    const fs::path path = folder / file_name;
    if (!fs::exists(path)) return {};
    const Json json = Json::parse(MappedFile(path).text(), nullptr, false);
    Choices choices;
    const auto damaged = [&] { return Error(path.string(), " is damaged; remove it to choose anew"); };
    if (!json.is_object() || !json.contains("recompute") || !json["recompute"].is_string() || !json.contains("kernels") ||
        !json["kernels"].is_array())
        throw damaged();
    choices.recompute = json["recompute"].get<std::string>();
    for (const Json& line : json["kernels"]) {
        if (!line.is_string()) throw damaged();
        choices.kernels += line.get<std::string>() + "\n";
    }
    return choices;
}

void write_choices(const fs::path& folder, const Choices& choices) {
    Json json = {{"recompute", choices.recompute}, {"kernels", Json::array()}};
    std::istringstream lines(choices.kernels);
    for (std::string line; std::getline(lines, line);) json["kernels"].push_back(line);
    write_file(folder / file_name, json.dump(2) + "\n");
}

}  // namespace train_gpt
