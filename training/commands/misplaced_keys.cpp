#include "training/commands/misplaced_keys.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/printable.h"
#include "training/config/config_keys.h"
#include "training/config/nearest_key.h"

namespace train_gpt {

namespace {

/// The key that a word on the command line means: --model.n_layer, model.n_layer=4, --n-layer=4;
/// empty if it means none.
std::string key_meant(const std::string& word) {
    const size_t dashes = std::min(word.find_first_not_of('-'), word.size());
    std::string name = word.substr(dashes, word.find('=') - dashes);
    if (dashes == 0 && word.find('=') == std::string::npos) return "";
    std::replace(name.begin(), name.end(), '-', '_');
    if (find_config_key(name)) return name;
    return is_config_section(section_of_key(name)) ? nearest_key(name) : key_called(name);
}

}  // namespace

void refuse_keys(int argc, char** argv) {
    for (int i = 2; i < argc; ++i) {
        const std::string word = argv[i];
        const size_t equals = word.find('=');
        const std::string key = key_meant(word);
        if (word == "--set" || word == "--vary") {
            ++i;  // its value
        } else if (!key.empty() && !word.starts_with("--set=") && !word.starts_with("--vary=")) {
            const bool has_next = i + 1 < argc && std::string(argv[i + 1]).rfind("--", 0) != 0;
            const std::string value = equals != std::string::npos ? word.substr(equals + 1)
                                      : has_next                  ? argv[i + 1]
                                                                  : "VALUE";
            throw UsageError(word,
                             " is not an option; a key of the configuration is set with --set ",
                             shell_word(key + "=" + value));
        }
    }
}

}  // namespace train_gpt
