#include "training/commands/command_line.h"

#include <utility>

#include "base/file.h"
#include "training/config/config_checks.h"
#include "training/config/config_parser.h"
#include "training/config/data_folder.h"
#include "training/config/presets.h"
#include "training/files/decay_start.h"

namespace train_gpt {

Config load_config(const CommandLine& line, int world) {
    Config config;
    const std::filesystem::path file = find_config(line.config);
    read_config(config, std::string(MappedFile(file).text()), file.string());
    std::vector<std::string> overrides;
    if (!line.data.empty()) overrides = data_overrides(line.data);
    overrides.insert(overrides.end(), line.overrides.begin(), line.overrides.end());
    for (const std::string& text : overrides) apply_override(config, text);
    config = with_decay_from(std::move(config));
    check_config(config, file.string(), world);
    return config;
}

}  // namespace train_gpt
