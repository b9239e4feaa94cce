#include "training/commands/command_line.h"

#include "base/file.h"
#include "training/config/config_checks.h"
#include "training/config/config_parser.h"
#include "training/config/data_folder.h"
#include "training/config/presets.h"

namespace train_gpt {

Config given_config(const CommandLine& line) {
    Config config;
    const std::filesystem::path file = find_config(line.config);
    read_config(config, std::string(MappedFile(file).text()), file.string());
    std::vector<std::string> overrides;
    if (!line.data.empty()) overrides = data_overrides(line.data);
    overrides.insert(overrides.end(), line.overrides.begin(), line.overrides.end());
    for (const std::string& text : overrides) apply_override(config, text);
    return config;
}

Config config_of_command(const CommandLine& line, int world, DecaysOf decays) {
    Config config = with_decay_from(given_config(line), decays);
    check_config(config, find_config(line.config).string(), world);
    return config;
}

}  // namespace train_gpt
