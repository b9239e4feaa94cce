#include "training/config/load_config.h"

#include "base/file.h"
#include "training/config/config_checks.h"
#include "training/config/config_parser.h"

namespace train_gpt {

Config parse_config(const std::string& text, const std::string& name,
                    const std::vector<std::string>& overrides) {
    Config config;
    read_config(config, text, name);
    for (const std::string& override_text : overrides) apply_override(config, override_text);
    check_config(config, name);
    return config;
}

Config load_config(const std::filesystem::path& file, const std::vector<std::string>& overrides) {
    const MappedFile mapped(file);
    return parse_config(std::string(mapped.text()), file.string(), overrides);
}

}  // namespace train_gpt
